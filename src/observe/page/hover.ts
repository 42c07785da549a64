/**
 * The page's script, as text for the reader's browser: it shows a vertical line and the values of the step under the pointer. The
 * rest of the page works without it.
 */
export const hoverScript = `
const numberText = (value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 5 : size < 100 ? 4 : 1 });
};
/* The last bin that begins at or before the step, or the next where that is nearer. */
const nearest = (first, step) => {
  let low = 0, high = first.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (first[middle] <= step) low = middle; else high = middle - 1;
  }
  return low + 1 < first.length && first[low + 1] - step < step - first[low] ? low + 1 : low;
};
const element = (parent, name, className, text) => {
  const made = parent.appendChild(document.createElement(name));
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
for (const box of document.querySelectorAll(".curves")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  for (const plot of box.querySelectorAll(".plot")) {
    const cross = element(plot, "div", "cross");
    const tip = element(plot, "div", "tip");
    const show = (share) => {
      const step = data.low + share * (data.high - data.low);
      const all = data.curves.map((curve) => ({ ...curve, at: nearest(curve.first, step) }));
      /* The curve with the nearest point says which step is meant. */
      const distance = ({ first, at }) => Math.abs(first[at] - step);
      const lead = all.reduce((best, one) => (distance(one) < distance(best) ? one : best));
      const [begin, end] = [lead.first[lead.at], lead.last ? lead.last[lead.at] : lead.first[lead.at]];
      tip.replaceChildren();
      element(tip, "b", "", (begin === end ? "step " : "steps ") + numberText(begin) + (begin === end ? "" : "–" + numberText(end)));
      let sum = 0;
      for (const { name, colour, first, mean, least, most, at } of all) {
        sum += mean[at];
        const row = element(tip, "div", "");
        /* A curve that is measured now and then says where. */
        const there = first[at] === begin || least ? "" : " at " + numberText(first[at]);
        element(row, "span", "key c" + colour, name + there);
        const range = least && least[at] < most[at] ? " (" + numberText(least[at]) + "–" + numberText(most[at]) + ")" : "";
        element(row, "span", "value", numberText(mean[at]) + data.unit + range);
      }
      if (data.stacked) {
        const row = element(tip, "div", "");
        element(row, "span", "", "together");
        element(row, "span", "value", numberText(sum) + data.unit);
      }
      const place = Math.min(1, Math.max(0, ((begin + end) / 2 - data.low) / (data.high - data.low)));
      plot.style.setProperty("--x", place);
      plot.classList.toggle("right", place > 0.5);
      plot.classList.add("pointed");
    };
    plot.addEventListener("pointermove", (event) => {
      const { left, width } = plot.getBoundingClientRect();
      show(Math.min(1, Math.max(0, (event.clientX - left) / width)));
    });
    plot.addEventListener("pointerleave", () => plot.classList.remove("pointed"));
  }
}
`;
