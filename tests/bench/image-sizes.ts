/**
 * Sizes of images of public data sets, to draw from. Of LAION-400M its own statistics (laion.ai/blog/laion-400-open-dataset:
 * of 413 million images 211 have both sides of at least 256 pixels, 67 of at least 512, 9.6 of at least 1024), inside a
 * class evenly on a logarithmic scale. Of LLaVA-1.5's 665k instructions the parts of its paper (arXiv 2310.03744, table 7)
 * with the usual size of each part's images: COCO 640 × 480, Visual Genome 500 × 375, Open Images 1024 × 768, book covers
 * 330 × 500; ShareGPT is text.
 */
import { numbersFrom } from "../../src/parity/verify/samples.ts";

/** Sides in pixels; null: text alone. */
export type ImageSize = { readonly width: number; readonly height: number } | null;

const laion = [
	{ share: 202 / 413, from: 128, to: 256 },
	{ share: 144 / 413, from: 256, to: 512 },
	{ share: 57.4 / 413, from: 512, to: 1024 },
	{ share: 9.6 / 413, from: 1024, to: 2048 },
] as const;

const llava = [
	// LLaVA-Instruct, VQAv2, OKVQA, A-OKVQA, RefCOCO: COCO.
	{ share: 158 + 83 + 9 + 66 + 48, size: { width: 640, height: 480 } },
	// GQA, Visual Genome.
	{ share: 72 + 86, size: { width: 500, height: 375 } },
	// TextCaps: Open Images.
	{ share: 22, size: { width: 1024, height: 768 } },
	// OCR-VQA: book covers.
	{ share: 80, size: { width: 330, height: 500 } },
	{ share: 40, size: null },
] as const;

function pick<Part extends { readonly share: number }>(parts: readonly Part[], at: number): Part {
	let rest = at * parts.reduce((sum, { share }) => sum + share, 0);
	for (const part of parts) {
		rest -= part.share;
		if (rest < 0) return part;
	}
	return parts.at(-1)!;
}

export const distributions = {
	"LAION-400M": (next: () => number): ImageSize => {
		const { from, to } = pick(laion, next());
		const side = from * (to / from) ** next();
		return { width: side, height: side };
	},
	"LLaVA-1.5": (next: () => number): ImageSize => pick(llava, next()).size,
	/** Half of each, as a mixture of captions and instructions has them. */
	mixture: (next: () => number): ImageSize =>
		next() < 0.5 ? distributions["LAION-400M"](next) : distributions["LLaVA-1.5"](next),
} as const;

export type DistributionName = keyof typeof distributions;

/** Sizes that repeat. */
export function sizesOf(name: DistributionName, count: number, seed: number): ImageSize[] {
	const next = numbersFrom(seed);
	return Array.from({ length: count }, () => distributions[name](next));
}
