/** Chooses what to compare: a reference folder trained again, or a log against golden values. */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { openDevice } from "../native/open-device.ts";
import { UserError } from "../system/errors.ts";
import type { Precision } from "./bf16.ts";
import type { ParityReport } from "./comparison.ts";
import { languageParity } from "./language/parity.ts";
import { logParity } from "./log.ts";

export interface ParityOptions {
	readonly golden: string;
	/** Checkpoint of any format to take the weights from; undefined: the reference's own. */
	readonly weights?: string | undefined;
	/** JSON log of a run; null: train the reference's own batches. */
	readonly log: string | null;
	/** Relative tolerance of that comparison. */
	readonly tolerance: number;
	readonly device: "auto" | "cpu" | "cuda";
	/** Runs of operations that repeat are launched as CUDA graphs. */
	readonly graphs: boolean;
	readonly threads: number;
	readonly precision: Precision;
}

export async function runParity(options: ParityOptions): Promise<ParityReport> {
	if (!existsSync(options.golden)) throw new UserError(`There is no reference at ${options.golden}.`);
	if (options.log !== null) return logParity(options.golden, options.log, options.tolerance);
	if (!statSync(options.golden).isDirectory() || !existsSync(join(options.golden, "golden.json"))) {
		throw new UserError(
			`${options.golden} is no reference folder (golden.json is missing); golden values need --log FILE to compare with.`,
		);
	}
	using device = await openDevice(options.device, { threads: options.threads, graphs: options.graphs });
	return await languageParity(device, options.golden, { weights: options.weights, precision: options.precision });
}
