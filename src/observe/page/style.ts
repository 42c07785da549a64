/** Style sheet of the report: one column on a phone, two on a wide screen; light or dark by the reader's preference. */
export const style = `
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --soft: #5b6675; --rule: #dfe3e8;
  --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #7c3aed; --c4: #64748b; --c5: #db2777; --c6: #0891b2; --bad: #dc2626; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #9aa5b4;
  --rule: #2d3540; --c0: #6ea0ff; --c1: #f2a93b; --c2: #3fc58f; --c3: #b08cff; --c4: #8a97a8; --c5: #f472b6; --c6: #45c4dd; --bad: #ff6b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; display: grid; gap: 16px;
  grid-template-columns: repeat(2, minmax(0, 1fr)); }
header, section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px;
  min-width: 0; }
.column { display: flex; flex-direction: column; gap: 16px; min-width: 0; }
.wide, header { grid-column: 1 / -1; }
h1 { font-size: 21px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 14px 0 6px; font-weight: 600; }
p { margin: 0 0 10px; color: var(--soft); }
.state { font-weight: 600; color: var(--c2); } .state.bad { color: var(--bad); } .state.quiet { color: var(--c1); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px 18px; margin: 14px 0 0; }
dl.facts dt { color: var(--soft); font-size: 13px; } dl.facts dd { margin: 0; font-size: 18px; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.chart { --height: 190px; display: grid; grid-template-columns: max-content minmax(0, 1fr); column-gap: 8px; }
/* A dot at the last step stands over the edge. */
.chart svg { width: 100%; height: var(--height); display: block; overflow: visible; clip-path: inset(0 -4px); }
/* Labels lie over each other, so that the widest makes the column, and move to their places. */
.levels { display: grid; height: 0; text-align: right; font-size: 12px; line-height: 16px; color: var(--soft);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.levels span { grid-area: 1 / 1; transform: translateY(calc(var(--height) * var(--at) - 8px)); }
.steps { grid-column: 2; position: relative; height: 18px; font-size: 12px; color: var(--soft); margin-top: 6px;
  font-variant-numeric: tabular-nums; }
.steps span { position: absolute; white-space: nowrap; left: calc(100% * var(--at)); transform: translateX(calc(-100% * var(--at))); }
.steps span:last-child::before { content: "step "; }
.curves { margin-bottom: 4px; }
.curves:has(.axis input:checked) .linear, .curves:not(:has(.axis input:checked)) .log { display: none; }
/* Alone it stands beside the title above. */
.keys:has(> .axis:only-child) { margin-top: -29px; }
:is(h2, h3):has(+ .curves > .keys > .axis:only-child) { padding-right: 90px; }
.axis { margin-left: auto; cursor: pointer; user-select: none; display: inline-flex; align-items: center; gap: 5px; }
.axis input { margin: 0; accent-color: var(--c0); }
.plot { position: relative; touch-action: pan-y; cursor: crosshair; }
.cross { position: absolute; top: 0; bottom: 0; left: calc(100% * var(--x, 0)); border-left: 1px solid var(--soft);
  visibility: hidden; pointer-events: none; }
.tip { position: absolute; z-index: 1; top: 4px; left: calc(100% * var(--x, 0) + 10px); visibility: hidden; pointer-events: none;
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 6px 10px; font-size: 12.5px;
  box-shadow: 0 3px 12px rgb(0 0 0 / .18); white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip div { display: flex; justify-content: space-between; gap: 16px; }
.plot.right .tip { left: auto; right: calc(100% * (1 - var(--x, 0)) + 10px); }
.plot.pointed .cross, .plot.pointed .tip { visibility: visible; }
svg .grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
svg .line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
svg .line.sparse { stroke-dasharray: 5 4; }
svg .dot { fill: none; stroke-width: 6; stroke-linecap: round; vector-effect: non-scaling-stroke; }
svg .band { opacity: .25; stroke: none; }
svg .mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
svg .mark.start, svg .mark.resume { stroke: var(--c2); } svg .mark.failure, svg .mark.not-finite, svg .mark.stop { stroke: var(--bad); }
${[0, 1, 2, 3, 4, 5, 6].map((i) => `.line.c${i}, .dot.c${i} { stroke: var(--c${i}); } .area.c${i}, .band.c${i} { fill: var(--c${i}); } .key.c${i}::before { background: var(--c${i}); }`).join("\n")}
.keys { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; color: var(--soft); margin-bottom: 14px; min-height: 4px; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.heat { display: grid; grid-template-columns: 76px minmax(0, 1fr); align-items: center; gap: 8px; font-size: 12px;
  color: var(--soft); } .heat svg { width: 100%; height: 20px; fill: var(--c0); display: block; margin: 1px 0; }
.bar { display: grid; grid-template-columns: minmax(86px, max-content) minmax(0, 1fr) max-content; gap: 10px; align-items: center;
  font-size: 13px; margin: 3px 0; font-variant-numeric: tabular-nums; }
.track { background: var(--page); border-radius: 4px; height: 14px; position: relative; }
.track div { background: var(--c4); opacity: .45; width: calc(100% * var(--at)); height: 100%; border-radius: 4px; position: absolute; }
.track div.inner { background: var(--c0); opacity: 1; }
.scroll { overflow-x: auto; max-height: 420px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } th { text-align: left; color: var(--soft); font-weight: 500; }
td, th { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; }
th { white-space: nowrap; } th.rest { width: 60%; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.modules { display: grid; grid-template-columns: minmax(0, 1fr) auto minmax(0, 2fr); gap: 14px; align-items: center; }
.modules.alone { grid-template-columns: minmax(0, 1fr); }
.module { border: 1px solid var(--rule); border-radius: 8px; padding: 10px; } .module > b { font-size: 13px; }
.lanes { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 8px; }
.lane { display: flex; gap: 2px; border: 1px solid var(--rule); border-radius: 6px; padding: 3px; }
.rank { background: var(--c1); color: #fff; border-radius: 4px; font-size: 11px; min-width: 22px; text-align: center; padding: 1px 3px; }
.rank.language { background: var(--c0); } @media (prefers-color-scheme: dark) { .rank { color: #0d1116; } }
.lanes.many .rank { min-width: 7px; height: 10px; padding: 0; font-size: 0; } .lanes.many .lane { padding: 1px; gap: 1px; }
.lanes.many { gap: 3px; }
.arrows { color: var(--soft); font-size: 13px; text-align: center; line-height: 1.7; }
.chart + p, .curves + p { margin: 8px 0 0; font-size: 14px; }
table.runs td { white-space: nowrap; overflow-wrap: normal; } table.runs .state { white-space: normal; display: inline-block; max-width: 40ch; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 14px; }
.samples figure { margin: 0; display: flex; gap: 12px; align-items: flex-start; border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px; font-size: 14px; min-width: 0; overflow-wrap: anywhere; }
.samples img { min-width: 96px; max-width: 112px; flex: none; image-rendering: pixelated; border-radius: 4px; } .samples figcaption { min-width: 0; }
.samples figcaption p { margin: 0 0 4px; max-height: 9em; overflow-y: auto; white-space: pre-wrap; }
.samples b { font-weight: 600; color: var(--text); } .samples .right b { color: var(--c2); } .samples .wrong b { color: var(--bad); }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
@media (max-width: 760px) { main { grid-template-columns: minmax(0, 1fr); padding: 10px 8px 32px; gap: 10px; }
  .column { gap: 10px; } header, section { padding: 14px 12px; } .modules { grid-template-columns: minmax(0, 1fr); }
  dl.facts { grid-template-columns: repeat(2, minmax(0, 1fr)); } .chart { --height: 160px; } .tip { left: auto; right: 0; }
  .plot.right .tip { left: 0; right: auto; }
  .events tr { display: grid; grid-template-columns: auto auto 1fr; } .events td, .events th { padding-right: 10px; }
  .events td { border-bottom: none; } .events td:nth-child(3) { grid-column: 1 / -1; order: 1; padding-top: 0;
  border-bottom: 1px solid var(--rule); } .events th:nth-child(3) { display: none; }
  .events td:nth-child(4), .events th:nth-child(4) { text-align: right; padding-right: 0; } }
`;
