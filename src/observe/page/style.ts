/** How the report looks: one column on a phone, two beside each other on a screen, light and dark as the reader prefers. */
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
.chart { display: grid; grid-template-columns: max-content minmax(0, 1fr); column-gap: 8px; }
.chart svg { width: 100%; height: 190px; display: block; }
.levels { display: flex; flex-direction: column; justify-content: space-between; text-align: right; font-size: 12px;
  color: var(--soft); font-variant-numeric: tabular-nums; margin: -8px 0; }
.steps { grid-column: 2; display: flex; justify-content: space-between; font-size: 12px; color: var(--soft); margin-top: 10px; }
svg .grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
svg .line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
svg .band { opacity: .25; stroke: none; }
svg .mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
svg .mark.start, svg .mark.resume { stroke: var(--c2); } svg .mark.failure, svg .mark.not-finite, svg .mark.stop { stroke: var(--bad); }
${[0, 1, 2, 3, 4, 5, 6].map((i) => `.line.c${i} { stroke: var(--c${i}); } .area.c${i}, .band.c${i} { fill: var(--c${i}); } .key.c${i}::before { background: var(--c${i}); }`).join("\n")}
.keys { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; color: var(--soft); margin-bottom: 12px; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.heat { display: grid; grid-template-columns: 76px minmax(0, 1fr); align-items: center; gap: 8px; font-size: 12px;
  color: var(--soft); } .heat svg { width: 100%; height: 20px; fill: var(--c0); display: block; margin: 1px 0; }
.bar { display: grid; grid-template-columns: minmax(86px, max-content) minmax(0, 1fr) max-content; gap: 10px; align-items: center;
  font-size: 13px; margin: 3px 0; font-variant-numeric: tabular-nums; }
.track { background: var(--page); border-radius: 4px; height: 14px; position: relative; }
.track div { background: var(--c4); opacity: .45; height: 100%; border-radius: 4px; position: absolute; }
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
.chart + p { margin: 8px 0 0; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
@media (max-width: 760px) { main { grid-template-columns: minmax(0, 1fr); padding: 10px 8px 32px; gap: 10px; }
  .column { gap: 10px; } header, section { padding: 14px 12px; } .modules { grid-template-columns: minmax(0, 1fr); }
  dl.facts { grid-template-columns: repeat(2, minmax(0, 1fr)); } .chart svg { height: 160px; } }
`;
