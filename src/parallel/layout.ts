/**
 * Layout strings: `ENCODER+LANGUAGE`, each side any of tpN, dpN, epN and etpN written together, or a bare number, which
 * means dp. A side has tp × dp ranks; ep and etp divide them again. `1` alone is one process that holds both modules.
 */
import { UserError } from "../native/errors.ts";
import { exitCodes } from "../native/exit-codes.ts";
import { lanesNest, layOut, type SideLayout, type Topology } from "./topology.ts";

export interface Layout {
	/** As it was written. */
	readonly text: string;
	/** null: one process holds both modules. */
	readonly encoder: SideLayout | null;
	readonly language: SideLayout;
}

type Piece = "tp" | "dp" | "ep" | "etp";

/** Part of a text and where it starts in the whole one. */
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

/** Layouts separated by commas. Throws a UserError that names the piece and its position, counted from 1. */
export function parseLayouts(text: string): Layout[] {
	return split({ text, offset: 0 }, ",").map((part) => parse(trim(part), text));
}

/** One layout. */
export function parseLayout(text: string): Layout {
	return parse(trim({ text, offset: 0 }), text);
}

/** The grids of a layout. */
export function topologyOfLayout({ encoder, language }: Layout): Topology {
	return layOut(encoder, language, encoder === null);
}

export interface NamedTopology {
	/** As the layout was written. */
	readonly name: string;
	readonly topology: Topology;
}

export function namedTopology(layout: Layout): NamedTopology {
	return { name: layout.text, topology: topologyOfLayout(layout) };
}

/** What is wrong with a part of `whole`. */
function refusal(whole: string, part: Part, message: string): UserError {
	const piece = part.text === "" ? "" : `${part.text.trim()} `;
	return new UserError(
		`Layout ${JSON.stringify(whole)}: ${piece}at position ${part.offset + 1}: ${message}.`,
		exitCodes.usage,
	);
}

function parse(layout: Part, whole: string): Layout {
	if (layout.text === "1") return { text: "1", encoder: null, language: sideOf({}) };
	const sides = split(layout, "+").map(trim);
	if (sides.length === 1) {
		throw refusal(whole, layout, "a layout is ENCODER+LANGUAGE, and 1 alone is one process with both");
	}
	if (sides.length > 2) throw refusal(whole, sides[2]!, "a layout has two sides, ENCODER+LANGUAGE");
	const [encoder, language] = sides.map((side) => parseSide(side, whole)) as [SideLayout, SideLayout];
	if (!lanesNest(encoder.data, language.data)) {
		const lanes = `${language.data} data lanes do not match the encoder's ${encoder.data}`;
		throw refusal(whole, sides[1]!, `${lanes}: one number has to be a multiple of the other`);
	}
	return { text: layout.text, encoder, language };
}

/** What Megatron's grids have besides. */
const unbuilt = { pp: "pipeline parallelism", cp: "context parallelism" } as const;

type Sizes = Partial<Record<Piece, number>>;

function sideOf({ tp = 1, dp = 1, ep = 1, etp = 1 }: Sizes): SideLayout {
	return { tensor: tp, data: dp, expert: ep, expertTensor: etp };
}

function parseSide(side: Part, whole: string): SideLayout {
	if (side.text === "") throw refusal(whole, side, "a side is missing");
	if (/^[1-9]\d{0,4}$/.test(side.text)) return sideOf({ dp: Number(side.text) });
	const sizes: Sizes = {};
	let last = side;
	for (const { 0: text, index } of side.text.matchAll(/[a-z]*[^a-z]*/g)) {
		if (text === "") break;
		const piece = { text, offset: side.offset + index };
		const [, name, size] = /^(tp|dp|ep|etp)([1-9]\d{0,4})$/.exec(text) ?? [];
		const [, absent] = /^(pp|cp)\d/.exec(text) ?? [];
		if (absent !== undefined) throw refusal(whole, piece, `${unbuilt[absent as keyof typeof unbuilt]} is not built`);
		if (name === undefined) {
			throw refusal(whole, piece, "a piece is tp, dp, ep or etp and a whole number from 1; a bare number stands alone");
		}
		if (sizes[name as Piece] !== undefined) throw refusal(whole, piece, `${name} is given a second time`);
		sizes[name as Piece] = Number(size);
		if (name === "ep" || name === "etp") last = piece;
	}
	const found = sideOf(sizes);
	const [ranks, experts] = [found.tensor * found.data, found.expert * found.expertTensor];
	if (ranks % experts !== 0) {
		throw refusal(whole, last, `ep × etp (${experts}) has to divide the ${ranks} ranks of tp × dp`);
	}
	return found;
}
