/** How much of the sequences is padding, by way of packing: a table of its own, since nothing is timed against anything. */
import { instructionLengths, type Packer, wasteOf } from "../data/vision-language/packing-waste.ts";

const packers: readonly Packer[] = ["carry-over", "greedy", "first-fit"];

/** Rows by sequence length and buffer; 50,000 samples of instructionLengths each. */
export function packingTable(): string {
	const rows = [4096, 16384].flatMap((capacity) =>
		[16, 100, 1000].map((size) => {
			const lengths = instructionLengths(50_000, capacity);
			const waste = packers.map((packer) => `${(100 * wasteOf(lengths, capacity, size, packer)).toFixed(2)} %`);
			return [String(capacity), String(size), ...waste];
		}),
	);
	const cells = [["seq-length", "buffer", ...packers], ...rows];
	const lines = cells.map((row) => `  ${row.map((cell) => cell.padStart(11)).join("")}`);
	return ["", "packing: part of the sequences that is padding, lengths lognormal of median 665 tokens", ...lines].join(
		"\n",
	);
}
