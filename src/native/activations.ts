/** Activations of MLPs and experts, beside the libraries' code of them (docs/add-an-activation.md). */
import { Activation, type ActivationName } from "./abi.ts";

interface ActivationRule {
	/** Megatron's flag, and the words of its help; null: no flag, what an MLP has without one, or an encoder's alone. */
	readonly flag: string | null;
	readonly help: string;
	/** Whether the input has two halves, the gate first. */
	readonly gated: boolean;
	/** Whether experts with it run as one fused operation. */
	readonly fused: boolean;
}

export const activations = {
	squaredRelu: { flag: "squared-relu", help: "Activation relu(x)².", gated: false, fused: true },
	swiglu: { flag: "swiglu", help: "Gated activation silu(gate) · up.", gated: true, fused: true },
	quickGeglu: {
		flag: "quick-geglu",
		help: "Gated activation gate · sigmoid(1.702 gate) · up.",
		gated: true,
		fused: true,
	},
	geglu: { flag: "geglu", help: "Gated activation gelu(gate) · up, GELU by tanh.", gated: true, fused: false },
	geluTanh: { flag: null, help: "GELU by tanh", gated: false, fused: false },
	geluErf: { flag: null, help: "GELU by erf", gated: false, fused: false },
} as const satisfies Record<ActivationName, ActivationRule>;

type Rules = typeof activations;
type Flagged = { [Name in keyof Rules]: Rules[Name]["flag"] extends null ? never : Name }[keyof Rules];

/** Names with a flag, which are keys of a configuration. */
export type ActivationKey = Flagged;
export type ActivationFlag = Rules[Flagged]["flag"];

/** [name, rule] of the activations with a flag. */
export const flaggedActivations = (Object.entries(activations) as [ActivationName, ActivationRule][]).filter(
	(entry): entry is [ActivationKey, ActivationRule & { readonly flag: ActivationFlag }] => entry[1].flag !== null,
);

/** The keys of a configuration for one activation; null: for GELU. */
export function activationKeys(chosen: ActivationKey | null): Record<ActivationKey, boolean> {
	return Object.fromEntries(flaggedActivations.map(([name]) => [name, name === chosen])) as Record<
		ActivationKey,
		boolean
	>;
}

/** The activation of a configuration; GELU by default. */
export function activationOf(c: Readonly<Record<ActivationKey, boolean>>): ActivationName {
	return flaggedActivations.find(([name]) => c[name])?.[0] ?? "geluTanh";
}

/** Flags of the activations with a property, as a list in a sentence: "swiglu or quick-geglu". */
export function activationsThat(has: "gated" | "fused"): string {
	const flags = flaggedActivations.filter(([, rule]) => rule[has]).map(([, { flag }]) => flag);
	return new Intl.ListFormat("en-GB", { type: "disjunction" }).format(flags);
}

export function isGatedActivation(kind: ActivationName): boolean {
	return activations[kind].gated;
}

const gatedCodes: ReadonlySet<number> = new Set(
	(Object.keys(activations) as ActivationName[]).filter(isGatedActivation).map((name) => Activation[name]),
);

/** Whether an activation is gated, by its code in the libraries. */
export function isGatedCode(code: number): boolean {
	return gatedCodes.has(code);
}
