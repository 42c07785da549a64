/** The guests of a run, in the order in which they are asked. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { fullestSample, patchCount } from "../data/mock.ts";
import type { HybridConfig } from "../models/language/config.ts";
import { balanceOf } from "./balance/balance.ts";
import { distillationOf } from "./distillation/distillation.ts";
import { elasticGuest } from "./elastic/elastic.ts";
import { elasticOf } from "./elastic/from-configuration.ts";
import type { Guest } from "./guest.ts";
import { mtpOf } from "./mtp/mtp.ts";
import { prefetchOf } from "./prefetch/prefetch.ts";

/** Those that a configuration asks for. `rank`: in lines that a guest prints. */
export function guestsOf(c: TrainingConfiguration, rank: number): Guest[] {
	// Memory is planned for packs that are full of images.
	const room = c.microBatchSize * patchCount(fullestSample(c)?.grids ?? []);
	return present([distillationOf(c, elasticOf(c)), elasticGuest(c), balanceOf(c, room), prefetchOf(c, rank)]);
}

/** All of a run: those that its model brings, and those that it is configured to have. */
export function guestsOfRun(model: HybridConfig, configured: readonly Guest[]): Guest[] {
	return present([mtpOf(model), ...configured]);
}

function present(guests: readonly (Guest | null)[]): Guest[] {
	return guests.filter((guest) => guest !== null);
}
