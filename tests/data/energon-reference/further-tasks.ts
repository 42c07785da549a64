/**
 * Task encoders beyond those of the reference data, for comparisons with the Python package at random settings
 * (tests/data/energon-random/tasks.py has the same): failures in the later steps.
 */

import { SkipSample } from "../../../src/data/energon/errors.ts";
import { hook } from "../../../src/data/energon/hook.ts";
import type { Keyed } from "../../../src/data/energon/sample.ts";
import type { TaskEncoder } from "../../../src/data/energon/task-encoder.ts";
import type { Groups } from "../../../src/data/energon/wrappers/packing.ts";
import { byteLength, collect, elementOf, encoded, packing } from "./elements.ts";

const batchOf = collect("batch");
const packOf = collect("pack");

/** Length of the first sample of a batch. */
const firstLength = (items: readonly Keyed[]) => byteLength(elementOf(items[0]!));

/** Task encoder `name`, on the base of `encode`; null for other names. */
export function furtherTask(
	name: string,
	encode: TaskEncoder,
	args: Readonly<Record<string, unknown>>,
): TaskEncoder | null {
	const { preencodeSample: _, ...plain } = encode;
	switch (name) {
		case "Stateful":
			return { ...plain, preencodeSample: hook("encode_sample", encoded, { stateless: false }) };
		case "BatchSkipping":
			return {
				...encode,
				batch: hook("batch", (items: readonly Keyed[]) => {
					if (firstLength(items) % 4 === 1) throw new SkipSample();
					return batchOf(items);
				}),
				encodeBatch: hook("encode_batch", (batch) => {
					if (firstLength([batch]) % 6 === 2) throw new Error("length mod 6 is 2");
					return batch;
				}),
			};
		case "PackingLossy":
			return lossy(plain, packing(args));
		default:
			return null;
	}
}

/** Leaves samples out while selecting, skips packs. */
function lossy(plain: TaskEncoder, { selectSamplesToPack: select, ...rest }: Partial<TaskEncoder>): TaskEncoder {
	return {
		...plain,
		...rest,
		preencodeSample: hook("preencode_sample", encoded),
		selectSamplesToPack: hook(
			"select_samples_to_pack",
			(items) =>
				(select!.run(items) as Groups<Keyed>).map((group) =>
					group.filter((item) => byteLength(elementOf(item)) % 4 !== 1),
				),
			{ stateless: false },
		),
		packSelectedSamples: hook("pack_selected_samples", (items) => {
			if (items.length % 3 === 0) throw new SkipSample();
			return packOf(items);
		}),
	};
}
