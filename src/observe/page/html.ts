/** Formats text and numbers for HTML, and the sections of a page. */

export function escapeHtml(text: string): string {
	const names: Readonly<Record<string, string>> = {
		"&": "&amp;",
		"<": "&lt;",
		">": "&gt;",
		'"': "&quot;",
		"'": "&#39;",
	};
	return text.replace(/[&<>"']/g, (character) => names[character]!);
}

/** A number for readers: "12.19", "3.4e-5", "1,234,567". */
export function numberText(value: number): string {
	if (!Number.isFinite(value)) return String(value);
	const size = Math.abs(value);
	if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
	if (Number.isInteger(value)) return value.toLocaleString("en");
	return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 5 : size < 100 ? 3 : 1 });
}

/** "39.7 ms". */
export function millisecondsText(value: number): string {
	return `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : value < 100 ? 1 : 0 })} ms`;
}

/** "2 h 5 min", "41 s". */
export function durationText(seconds: number): string {
	const whole = Math.round(seconds);
	if (whole < 60) return `${whole} s`;
	if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
	return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** A section of the page; "" without content. */
export function section(title: string, content: string, wide = false): string {
	return content === ""
		? ""
		: `<section${wide ? ' class="wide"' : ""}><h2>${escapeHtml(title)}</h2>${content}</section>`;
}
