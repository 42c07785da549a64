/** `mimo evaluate` of a checkpoint, and the flags that its format does not tell. */
import type { Case } from "../case.ts";
import { argumentsOf, type Flags } from "../draw.ts";

export interface Evaluated {
	readonly samples: number;
	readonly tokens: number;
	readonly loss: number;
	readonly budgets: readonly { readonly budget: number; readonly loss: number }[];
}

/** How data are read and pictures sized: no part of a model. */
const reading =
	/^(seq-length|device|threads|num-workers|data-(begin|end|pad)-id|data-too-long|img-.|use-.*|(min|max)-num-tiles|dynamic-resolution.*|image-(tag-type|token-id)|conversation-template|chat-template|caption-prompt|loss-roles)$/;

export function readingOf(flags: Flags): Flags {
	return Object.fromEntries(Object.entries(flags).filter(([key]) => reading.test(key)));
}

/** What a converted checkpoint does not tell of its encoder. */
export const visionOf = (flags: Flags): Flags =>
	Object.fromEntries(
		Object.entries(flags).filter(([key]) =>
			/^(model-provider|vision-|class-token|pixel-sh|disable-vis|patch-dim)/.test(key),
		),
	);

/** The first `samples` of the validation part of `data`, or of a text; `from` names the checkpoint. */
export function evaluated(place: Case, from: readonly string[], data: string, more: Flags = {}): Evaluated {
	const samples = "samples" in more ? {} : { samples: "1000" };
	const flags = argumentsOf({ device: "cpu", ...samples, ...more });
	const said = place.mimo(["evaluate", ...from, "--data", data, "--json", ...flags]);
	return (JSON.parse(said) as { readonly datasets: readonly Evaluated[] }).datasets[0]!;
}
