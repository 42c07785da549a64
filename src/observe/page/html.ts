/**
 * HTML pages. Markup is made by the tag `html`, which escapes every text that is inserted, so that no value of a log or a data set
 * becomes markup or a script. Formats of numbers, and the sections of a page.
 */
import { createHash } from "node:crypto";

/** Markup. Only the functions of this file make it. */
export class Html {
	readonly #markup: string;

	private constructor(markup: string) {
		this.#markup = markup;
	}

	get isEmpty(): boolean {
		return this.#markup === "";
	}

	toString(): string {
		return this.#markup;
	}

	/** The markup of a template; texts and numbers between its parts are escaped, lists are joined. */
	static of(parts: TemplateStringsArray, ...values: readonly Insertion[]): Html {
		return new Html(parts.map((part, i) => (i === 0 ? part : Html.#inserted(values[i - 1]!) + part)).join(""));
	}

	/** Data of the page's script as JSON, which the browser does not run. */
	static data(value: unknown): Html {
		const text = JSON.stringify(value).replaceAll("<", "\\u003c");
		return new Html(`<script type="application/json">${text}</script>`);
	}

	static #inserted(value: Insertion): string {
		if (value instanceof Html) return value.#markup;
		if (typeof value === "object") return value.map(Html.#inserted).join("");
		return String(value).replace(/[&<>"']/g, (character) => characterNames[character]!);
	}
}

/** Values between the parts of a template. In a tag they stand between quotation marks. */
export type Insertion = Html | string | number | readonly Insertion[];

const characterNames: Readonly<Record<string, string>> = {
	"&": "&amp;",
	"<": "&lt;",
	">": "&gt;",
	'"': "&quot;",
	"'": "&#39;",
};

export const html = Html.of;

/** No markup. */
export const nothing = html``;

/** Steps of a place. */
const places = 1000;

/**
 * Class of an element at a share of its parent, from 0 to 1: the style sheet gets a rule with the share as `--at`, because the
 * page's policy allows no style attributes.
 */
export function place(share: number): string {
	return `at-${Math.round(places * Math.min(1, Math.max(0, share)))}`;
}

/**
 * A whole page. Its Content-Security-Policy allows its own style sheet and script by their hashes and images within the page, so
 * that a browser runs and fetches nothing else. `style` and `script` are the program's own texts.
 */
export function htmlPage(
	title: string,
	{ style, script = null, body }: { readonly style: string; readonly script?: string | null; readonly body: Html },
): string {
	const used = new Set(Array.from(String(body).matchAll(/[" ]at-(\d+)[" ]/g), ([, at]) => Number(at)));
	const rules = [...used].sort((a, b) => a - b).map((at) => `.at-${at} { --at: ${at / places}; }`);
	const sheet = [style, ...rules].join("\n");
	const policy = [
		...["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"],
		`style-src ${hashOf(sheet)}`,
		...(script === null ? [] : [`script-src ${hashOf(script)}`]),
	];
	return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="${policy.join("; ")}">
<meta name="viewport" content="width=device-width, initial-scale=1">
${html`<title>${title}</title>`}<style>${sheet}</style></head>
<body>${body}${script === null ? "" : `<script>${script}</script>`}</body></html>
`;
}

const hashOf = (text: string) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

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

/** A section of the page; nothing without content. */
export function section(title: string, content: Html, { wide = false } = {}): Html {
	if (content.isEmpty) return nothing;
	return html`<section class="${wide ? "wide" : ""}"><h2>${title}</h2>${content}</section>`;
}
