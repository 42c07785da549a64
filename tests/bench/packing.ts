/**
 * How much of the sequences is padding, and how equal steps with photographs are, by way of packing: tables of their own, since
 * nothing is timed against anything.
 */
import { fullestSample, patchCount } from "../../src/data/mock.ts";
import {
	evennessOf,
	instructionLengths,
	type Packer,
	photographs,
	twentyLayers,
	wasteOf,
} from "../data/vision-language/packing-waste.ts";

const packers: readonly Packer[] = ["carry-over", "greedy", "first-fit"];
const percent = (part: number) => `${(100 * part).toFixed(2)} %`;
const tableOf = (cells: readonly (readonly string[])[]) =>
	cells.map((row) => `  ${row.map((cell) => cell.padStart(12)).join("")}`);

/** Rows by sequence length and buffer; 50,000 samples of instructionLengths each. Then rows by packer, of photographs. */
export function packingTable(): string {
	const rows = [4096, 16384].flatMap((capacity) =>
		[16, 100, 1000].map((size) => {
			const lengths = instructionLengths(50_000, capacity);
			const waste = packers.map((packer) => percent(wasteOf(lengths, capacity, size, packer)));
			return [String(capacity), String(size), ...waste];
		}),
	);
	return [
		"",
		"packing: part of the sequences that is padding, lengths lognormal of median 665 tokens",
		...tableOf([["seq-length", "buffer", ...packers], ...rows]),
		...[4_000, 40_000].flatMap((count) => evennessTable(count)),
		`  mimo plan counts ${patchCount(fullestSample(twentyLayers)!.grids)} patches of a pack`,
	].join("\n");
}

function evennessTable(count: number): string[] {
	const samples = photographs(count);
	const rows = (["carry-over", "equal-work", "greedy"] as const).map((name) => {
		const even = evennessOf(samples, { size: 200, packer: name }, Number.POSITIVE_INFINITY);
		const { steps, packs, most, padding, lanes } = even;
		const spread = [percent(steps), percent(packs), percent(most.step - 1)];
		return [name, ...spread, String(most.patches), percent(padding), ...lanes.map(percent)];
	});
	return [
		`packing: spread of operations, ${count} photographs, 20 layers with encoder, steps of 4 x 8,192 tokens; then for what part of the`,
		"encoder's operations two lanes wait for each other, as the pictures are read and by cost, within read and planned patches",
		...tableOf([
			["", "of steps", "of packs", "most above", "most patches", "padding", "as read", "by cost", "planned"],
			...rows,
		]),
	];
}
