/** The guests of a run, in the order in which they are asked. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { balanceOf } from "./balance/balance.ts";
import type { Guest } from "./guest.ts";
import { prefetchOf } from "./prefetch/prefetch.ts";

/** Each returns its guest, or null where the configuration does not ask for it. `rank`: in lines that a guest prints. */
const list: readonly ((c: TrainingConfiguration, rank: number) => Guest | null)[] = [balanceOf, prefetchOf];

export function guestsOf(c: TrainingConfiguration, rank: number): Guest[] {
	return list.map((of) => of(c, rank)).filter((guest) => guest !== null);
}
