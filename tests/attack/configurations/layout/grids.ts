/** Grids for a drawn model: those that a configuration is checked to take. */
import { plannedIterations } from "../../../../src/config/derive.ts";
import { resolveConfiguration } from "../../../../src/config/resolve.ts";
import { elasticConfig } from "../../../../src/guests/elastic/from-configuration.ts";
import { hybridConfig } from "../../../../src/models/language/from-configuration.ts";
import { UserError } from "../../../../src/system/errors.ts";
import { argumentsOf, type Draw, type Flags } from "../draw.ts";
import { hasEncoder } from "../model/vision.ts";

export interface Grids {
	/** As `mimo verify --layouts` takes it. */
	readonly layout: string;
	readonly flags: Flags;
	readonly ranks: number;
}

/** The sentence that refuses a configuration; null: it is allowed. */
export function refusal(flags: Flags): string | null {
	try {
		const { configuration } = resolveConfiguration(argumentsOf(flags));
		elasticConfig(configuration, hybridConfig(configuration), plannedIterations(configuration));
		return null;
	} catch (error) {
		if (error instanceof UserError) return error.message;
		throw error;
	}
}

const mostRanks = 5;
/** Numbers of ranks along an axis. Odd ones share buffers that are padded to powers of two. */
const counts = [1, 1, 1, 2, 2, 2, 3, 4, 5];

interface Side {
	readonly tp: number;
	readonly dp: number;
	readonly pp: number;
	readonly ep: number;
	readonly etp: number;
}

function drawSide(draw: Draw): Side {
	for (;;) {
		const [tp, dp, pp] = [draw.one(counts), draw.one(counts), draw.one(counts)];
		if (tp * dp * pp > mostRanks) continue;
		const stage = tp * dp;
		const ep = draw.one([1, 2, 2, 4].filter((size) => stage % size === 0));
		const etp = draw.chance(0.7) ? 1 : draw.one([1, 2].filter((size) => (stage / ep) % size === 0));
		return { tp, dp, pp, ep, etp };
	}
}

function sideText(side: Partial<Side>): string {
	const pieces = Object.entries(side).filter(([, size]) => size > 1);
	return pieces.map(([name, size]) => `${name}${size}`).join("") || "dp1";
}

/** Grids of the language model, and of the encoder where there is one. */
export function drawGrids(draw: Draw, encoder: boolean): Grids {
	const language = drawSide(draw);
	const { tp, dp, pp, ep, etp } = language;
	const ranks = tp * dp * pp;
	const flags = {
		"llm-tp": String(tp),
		"llm-dp": String(dp),
		"llm-pp": String(pp),
		"llm-ep": String(ep),
		"llm-expt-tp": String(etp),
	};
	if (!encoder) return { layout: sideText(language), flags, ranks };
	const colocated = draw.chance(0.35);
	const sizes = [1, 1, 2, 2, 4];
	const own = colocated ? ranks : draw.one([1, 1, 2, 2, 4]);
	const tensor = draw.one(sizes.filter((size) => own % size === 0));
	const side = { tp: tensor, dp: own / tensor };
	return {
		layout: `${sideText(side)}${colocated ? "|" : "+"}${sideText(language)}`,
		flags: {
			...flags,
			"encoder-tp": String(side.tp),
			"encoder-dp": String(side.dp),
			"llm-offset": String(colocated ? 0 : own),
		},
		ranks: colocated ? ranks : own + ranks,
	};
}

/** Up to `count` different grids that the configuration takes; fewer where it takes few. */
export function drawAllowedGrids(
	draw: Draw,
	flags: Flags,
	count: number,
	refused: (sentence: string) => void,
): Grids[] {
	const found = new Map<string, Grids>();
	for (let attempt = 0; attempt < 40 && found.size < count; attempt++) {
		const grids = drawGrids(draw, hasEncoder(flags));
		if (grids.ranks === 1 || found.has(grids.layout)) continue;
		const sentence = refusal({ ...flags, ...grids.flags });
		if (sentence === null) found.set(grids.layout, grids);
		else refused(sentence);
	}
	return [...found.values()];
}
