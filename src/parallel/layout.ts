/**
 * Layout strings: `ENCODER+LANGUAGE` on ranks of their own, `ENCODER|LANGUAGE` on the same ranks. Several encoders stand one after the
 * other, and the sign behind each says whether it is on ranks of its own or on the language model's: `2+1|tp2`. A side is any of tpN, cpN,
 * dpN, ppN, epN and etpN written together, or a bare number, which means dp. It has tp × cp × dp × pp ranks; ep and etp divide those
 * of a pipeline stage again. Encoders have no cp; one with pp is on ranks of its own. A language side alone is a language model without an encoder; `1` alone
 * is one process that holds all modules.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { lanesNest } from "./edge-layout.ts";
import { layOut, type SideLayout, type Topology, visionModule } from "./topology.ts";

export interface Layout {
	/** The text as given. */
	readonly text: string;
	/** In the order of the modules; empty: a language model alone. */
	readonly encoders: readonly { readonly shape: SideLayout; readonly colocated: boolean }[];
	readonly language: SideLayout;
}

type Piece = "tp" | "cp" | "dp" | "pp" | "ep" | "etp";

/** A part of the text and its offset. */
interface Part {
	readonly text: string;
	readonly offset: number;
}

function split({ text, offset }: Part, separator: string): Part[] {
	let at = offset;
	return text.split(separator).map((part) => {
		const found = { text: part, offset: at };
		at += part.length + separator.length;
		return found;
	});
}

function trim({ text, offset }: Part): Part {
	return { text: text.trim(), offset: offset + text.length - text.trimStart().length };
}

/** Parses layouts separated by commas. Throws a UserError that names the piece and its position, counted from 1. */
export function parseLayouts(text: string): Layout[] {
	return split({ text, offset: 0 }, ",").map((part) => parse(trim(part), text));
}

/** Parses one layout. */
export function parseLayout(text: string): Layout {
	return parse(trim({ text, offset: 0 }), text);
}

/** The layout `1` of a language model without an encoder. */
export const languageAlone: Layout = { text: "1", encoders: [], language: sideOf({}) };

/**
 * `1` stands for models with any number of encoders: returns the layout for a model with `encoders` of them. Throws a UserError if
 * another layout has another number.
 */
export function layoutFor(layout: Layout, { encoders }: { readonly encoders: number }): Layout {
	if (layout.text === "1") {
		return { ...layout, encoders: new Array(encoders).fill({ shape: sideOf({}), colocated: true }) };
	}
	const found = layout.encoders.length;
	if (found === encoders) return layout;
	const reason =
		encoders === 0
			? "the model has no encoder; a layout is one side, such as tp2pp2"
			: encoders === 1 && found === 0
				? "it has no side for the encoder; a layout is ENCODER+LANGUAGE or ENCODER|LANGUAGE"
				: `it has sides for ${counted(found, "encoder")}, and the model has ${encoders}`;
	throw new UserError(`Layout ${layout.text}: ${reason}.`, exitCodes.usage);
}

/** The topology of a layout, of encoders with these names. */
export function topologyOfLayout({ encoders, language }: Layout, names: readonly string[] = [visionModule]): Topology {
	return layOut(
		encoders.map((encoder, index) => ({ name: names[index]!, ...encoder })),
		language,
	);
}

export interface NamedTopology {
	/** As the layout was written. */
	readonly name: string;
	readonly topology: Topology;
}

export function namedTopology(layout: Layout, names?: readonly string[]): NamedTopology {
	return { name: layout.text, topology: topologyOfLayout(layout, names) };
}

/** A UserError about a part of `whole`. */
function refusal(whole: string, part: Part, message: string): UserError {
	const piece = part.text === "" ? "" : `${part.text.trim()} `;
	return new UserError(
		`Layout ${JSON.stringify(whole)}: ${piece}at position ${part.offset + 1}: ${message}.`,
		exitCodes.usage,
	);
}

function parse(layout: Part, whole: string): Layout {
	if (layout.text === "") throw refusal(whole, layout, "a layout is ENCODER+LANGUAGE, ENCODER|LANGUAGE or LANGUAGE");
	if (layout.text === "1") {
		return { text: "1", encoders: [{ shape: sideOf({}), colocated: true }], language: sideOf({}) };
	}
	const signs = [...layout.text].filter((sign) => sign === "+" || sign === "|");
	const sides = split({ ...layout, text: layout.text.replaceAll("|", "+") }, "+").map(trim);
	const shapes = sides.map((side) => parseSide(side, whole));
	const language = shapes.at(-1)!;
	const encoders = shapes.slice(0, -1).map((shape, index) => {
		const [side, last] = [sides[index]!, sides.at(-1)!];
		const colocated = signs[index] === "|";
		if (shape.context !== undefined) throw refusal(whole, side, "an encoder has no context parallelism");
		if (colocated && shape.pipeline > 1) {
			throw refusal(whole, side, "an encoder in pipeline stages needs ranks of its own (+)");
		}
		const [own, other] = [ranksOfSide(shape), ranksOfSide(language)];
		if (colocated && own !== other) {
			throw refusal(whole, last, `${other} ranks of the language model are not the encoder's ${own}`);
		}
		if (!lanesNest(shape.data, language.data)) {
			const lanes = `${language.data} data lanes do not match the encoder's ${shape.data}`;
			throw refusal(whole, last, `${lanes}: one number has to be a multiple of the other`);
		}
		return { shape, colocated };
	});
	return { text: layout.text, encoders, language };
}

function ranksOfSide({ tensor, context = 1, data, pipeline }: SideLayout): number {
	return tensor * context * data * pipeline;
}

type Sizes = Partial<Record<Piece, number>>;

function sideOf({ tp = 1, cp = 1, dp = 1, pp = 1, ep = 1, etp = 1 }: Sizes): SideLayout {
	return { tensor: tp, ...(cp > 1 && { context: cp }), data: dp, pipeline: pp, expert: ep, expertTensor: etp };
}

function parseSide(side: Part, whole: string): SideLayout {
	if (side.text === "") throw refusal(whole, side, "a side is missing");
	if (/^[1-9]\d{0,4}$/.test(side.text)) return sideOf({ dp: Number(side.text) });
	const sizes: Sizes = {};
	let last = side;
	for (const { 0: text, index } of side.text.matchAll(/[a-z]*[^a-z]*/g)) {
		if (text === "") break;
		const piece = { text, offset: side.offset + index };
		const [, name, size] = /^(tp|cp|dp|pp|ep|etp)([1-9]\d{0,4})$/.exec(text) ?? [];
		if (name === undefined) {
			throw refusal(
				whole,
				piece,
				"a piece is tp, cp, dp, pp, ep or etp and a whole number from 1; a bare number stands alone",
			);
		}
		if (sizes[name as Piece] !== undefined) throw refusal(whole, piece, `${name} is given a second time`);
		sizes[name as Piece] = Number(size);
		if (name === "ep" || name === "etp") last = piece;
	}
	const found = sideOf(sizes);
	const [ranks, experts] = [ranksOfSide({ ...found, pipeline: 1 }), found.expert * found.expertTensor];
	if (ranks % experts !== 0) {
		throw refusal(whole, last, `ep × etp (${experts}) has to divide the ${ranks} ranks of tp × cp × dp`);
	}
	return found;
}
