/**
 * Tolerances of losses and norms against a reference. A band is the largest relative difference seen so far between the reference
 * and other correct runs; three bands are allowed, and at least a few roundings of fp32.
 */
import { join } from "node:path";
import type * as v from "valibot";
import { UserError } from "../system/errors.ts";
import { configurationHas, readReferenceJson } from "./reference-json.ts";

export type Banded = "loss" | "grad_norm" | "seq_load_balancing_loss";

interface Bounds {
	/** Allowed where the band is smaller. */
	readonly least: number;
	/** Largest band of the reference's exact steps: rounding alone, before a routing decision flips. */
	readonly exact: number;
	/** Largest band of later steps, whose trajectories have parted. */
	readonly parted: number;
}

const bounds: Readonly<Record<Banded, Bounds>> = {
	loss: { least: 2e-6, exact: 1e-6, parted: 0.02 },
	grad_norm: { least: 1e-5, exact: 2e-5, parted: 0.5 },
	seq_load_balancing_loss: { least: 1e-5, exact: 1e-5, parted: 0.5 },
};

/** Largest relative difference from the reference's value. */
export function bandLimit(quantity: Banded, band: number): number {
	return Math.max(bounds[quantity].least, 3 * band);
}

type BandedSteps = readonly { readonly [Key in `${Banded}_band`]?: number | undefined }[];

/** The two files of a reference folder, as a format reads them. */
export interface ReferenceFiles<Config, Golden> {
	readonly config: Config;
	readonly golden: Golden;
}

/** A format of reference folders whose golden.json has bands. */
export class BandedFormat<Config, Golden extends { readonly exact_steps: number; readonly steps: BandedSteps }> {
	/** `key`: stands in config.json of this format's folders alone. */
	constructor(
		private readonly key: string,
		private readonly schemas: ReferenceFiles<v.GenericSchema<unknown, Config>, v.GenericSchema<unknown, Golden>>,
	) {}

	/** Whether a folder is a reference in this format. */
	holds(folder: string): boolean {
		return configurationHas(folder, this.key);
	}

	/** Reads and checks both files and the bands; the error names the file and the field. */
	read(folder: string): ReferenceFiles<Config, Golden> {
		const config = readReferenceJson(this.schemas.config, join(folder, "config.json"));
		const path = join(folder, "golden.json");
		const golden = readReferenceJson(this.schemas.golden, path);
		requireBands(path, golden.exact_steps, golden.steps);
		return { config, golden };
	}
}

/** Throws a UserError for a band that would let a wrong run pass. `exactSteps`: steps before the first flipped decision. */
export function requireBands(path: string, exactSteps: number, steps: BandedSteps): void {
	if (!Number.isInteger(exactSteps) || exactSteps < 0 || exactSteps > steps.length) {
		throw new UserError(`${path}: exact_steps is ${exactSteps}; allowed is a whole number from 0 to ${steps.length}.`);
	}
	for (const [index, step] of steps.entries()) {
		for (const [quantity, { exact, parted }] of Object.entries(bounds) as [Banded, Bounds][]) {
			const band = step[`${quantity}_band`];
			if (band === undefined) continue;
			const largest = index < exactSteps ? exact : parted;
			if (band >= 0 && band <= largest) continue;
			const which = index < exactSteps ? `one of the ${exactSteps} exact steps` : "past the exact steps";
			throw new UserError(
				`${path}: ${quantity}_band of step ${index + 1} is ${band}; allowed is 0 to ${largest}, ${which}.`,
			);
		}
	}
}
