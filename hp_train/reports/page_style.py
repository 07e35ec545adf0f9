"""The style and the script of a report's page: everything inline, nothing fetched. Constants only. No torch."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c1e21; --dim: #5d646e; --rule: #e0e2e6;
  --s1: #1f62b5; --s2: #b8530b; --s3: #18794e; --s4: #7a3fa8; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --card: #1f2226; --ink: #e8e9eb; --dim: #a1a8b3;
  --rule: #363b42; --s1: #79b0f2; --s2: #f0a35e; --s3: #6ccb96; --s4: #cb9df0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 34px 0 10px; }
p.sub { margin: 2px 0 18px; color: var(--dim); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tile { padding: 10px 12px; } .tile b { display: block; font-size: 19px; font-weight: 600; overflow-wrap: anywhere; }
.tile span, figcaption .key { color: var(--dim); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
figure { position: relative; margin: 0; padding: 10px 12px; } figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption .key { font-weight: 400; margin-left: 10px; white-space: nowrap; }
figcaption .key::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 5px;
  vertical-align: middle; background: currentColor; }
.key.s1::before { color: var(--s1); } .key.s2::before { color: var(--s2); } .key.s3::before { color: var(--s3); }
.key.s4::before { color: var(--s4); }
svg { display: block; width: 100%; height: auto; } .grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--dim); font-size: 11px; } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
path.s1 { stroke: var(--s1); } path.s2 { stroke: var(--s2); } path.s3 { stroke: var(--s3); }
path.s4 { stroke: var(--s4); } circle.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); }
circle.s3 { fill: var(--s3); } circle.s4 { fill: var(--s4); }
.cursor { stroke: var(--dim); stroke-dasharray: 3 3; visibility: hidden; }
.tip { position: absolute; top: 36px; padding: 3px 8px; border-radius: 6px; background: var(--ink); color: var(--page);
  font-size: 12px; white-space: pre; pointer-events: none; visibility: hidden; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; min-width: 50%; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 500; } td.number { font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; margin: 0; }
.card { padding: 10px 14px; } summary { cursor: pointer; }
img.timeline { width: 100%; background: #fff; border-radius: 6px; }
"""

SCRIPT = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [low, high] = data.x, span = high - low;
  const share = step => span ? (step - low) / span : 0.5;
  const place = step => data.left + share(step) * (data.right - data.left);
  const nearest = (points, step) => {
    let first = 0, last = points.length - 1;
    while (last - first > 1) {
      const middle = (first + last) >> 1;
      points[middle][0] <= step ? first = middle : last = middle;
    }
    return step - points[first][0] <= points[last][0] - step ? points[first] : points[last];
  };
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const wanted = low + (x - data.left) / (data.right - data.left) * span;
    const step = nearest(data.series[0][1], wanted)[0];
    const lines = data.series.map(([name, points]) => {
      const point = nearest(points, step);
      return name + " " + point[2] + (point[0] === step ? "" : " (step " + point[0] + ")");
    });
    tip.textContent = "step " + step.toLocaleString("en") + "\\n" + lines.join("\\n");
    cursor.setAttribute("x1", place(step)); cursor.setAttribute("x2", place(step));
    cursor.style.visibility = tip.style.visibility = "visible";
    const left = place(step) / scale + 22, fits = left + tip.offsetWidth <= figure.clientWidth;
    tip.style.left = Math.max(4, fits ? left : left - tip.offsetWidth - 26) + "px";
  };
  const hide = () => { cursor.style.visibility = tip.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", show); svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
"""
