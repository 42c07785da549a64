/** A model's tensors with and without those of its low-rank adapters. */
import { adapterScale, isAdapterName } from "../../models/lora.ts";
import type { NamedTensors } from "../model-store.ts";

/** The tensors of the base: those that other checkpoints of the model have too. */
export function withoutAdapters(model: NamedTensors): NamedTensors {
	return select(model, (name) => !isAdapterName(name));
}

export function adaptersOf(model: NamedTensors): NamedTensors {
	return select(model, isAdapterName);
}

function select(model: NamedTensors, wanted: (name: string) => boolean): NamedTensors {
	return {
		*logicalTensors() {
			for (const tensor of model.logicalTensors()) {
				if (wanted(tensor.name)) {
					yield tensor;
					continue;
				}
				tensor.value[Symbol.dispose]();
				tensor.gradient?.[Symbol.dispose]();
			}
		},
	};
}

/** α / r of the adapters of a run or of a checkpoint; null without adapters. */
export function scaleOf(model: { readonly loraRank?: unknown; readonly loraAlpha?: unknown }): number | null {
	const { loraRank: rank, loraAlpha: alpha } = model;
	return typeof rank === "number" && typeof alpha === "number" ? adapterScale({ rank, alpha }) : null;
}
