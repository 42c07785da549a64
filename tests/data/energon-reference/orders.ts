/** Replays `orders/`: the outputs of every rank's loader, in order. */
import { EmulatedLoader, type EmulatedOutput } from "./emulated-loader.ts";
import { difference, type OrderFile, type Row, rowDifference, rowOf } from "./golden.ts";
import type { Setting } from "./setup.ts";

/** Outputs of a loader until there are `count`, over as many passes as needed; where passes end. */
export function deliver(
	loader: EmulatedLoader,
	count: number,
	row: (output: EmulatedOutput) => Row,
	passes: { ends: number[]; untilEnd: number } = { ends: [], untilEnd: 0 },
): { rows: Row[]; ends: number[] } {
	const rows: Row[] = [];
	const { ends, untilEnd } = passes;
	let empty = 0;
	while (rows.length < count || ends.length < untilEnd) {
		const output = loader.next();
		if (output !== null) {
			if (rows.length >= count) break;
			rows.push(row(output));
			empty = 0;
			continue;
		}
		ends.push(rows.length);
		// A dataset without samples ends at once, again and again.
		if (++empty > 2) break;
	}
	return { rows, ends };
}

export function replayOrder(setting: Setting, file: OrderFile): string | null {
	for (const { rank, outputs, epoch_ends: ends, dataset_len_rank: length } of file.ranks) {
		const loader = new EmulatedLoader(setting, file.dataset, file.parameters, rank);
		const delivered = deliver(
			loader,
			outputs.length,
			({ item, worker }) => rowOf(item, worker, setting.golden, file.shards),
			{ ends: [], untilEnd: ends?.length ?? 0 },
		);
		const found =
			rowDifference(delivered.rows, outputs, `rank ${rank}`) ??
			difference(
				ends === undefined ? undefined : delivered.ends.slice(0, ends.length),
				ends,
				`rank ${rank}, epoch ends`,
			) ??
			(length === undefined ? null : difference(loader.length, length, `rank ${rank}, length`));
		if (found !== null) return found;
	}
	return null;
}
