/** What has to hold between runs of a drawn configuration. */
import type { Case } from "../case.ts";
import type { Draw, Flags } from "../draw.ts";
import type { Emphasis } from "../model/model.ts";

export type Verdict = "ok" | "tie";

export interface Relation {
	readonly name: string;
	/** How often models have a part, where it is not as usual. */
	readonly emphasis?: Partial<Emphasis>;
	/** Whether a model and its data have it. */
	readonly suits?: (flags: Flags) => boolean;
	/** `flags` name a model; the relation adds what it needs. Throws Refused or Wrong. */
	readonly hold: (draw: Draw, flags: Flags, place: Case) => Verdict;
}
