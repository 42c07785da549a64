/** The loss without training: dropout is off, routers do not count. */
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel, Observer } from "../models/hybrid/model.ts";
import { type Group, groupOfOne } from "../parallel/group.ts";
import { Tape } from "../tensor/tape.ts";
import { DeviceInput } from "./device-input.ts";
import { tokenLoss } from "./language-loss.ts";
import { LossAccumulator } from "./loss.ts";

/** Mean loss of a token over the microbatches of every rank of `world` that counts losses. */
export function evaluate(
	model: HybridModel,
	microbatches: readonly Microbatch[],
	options: { readonly observe?: Observer; readonly world?: Group } = {},
): { loss: number; tokens: number } {
	using losses = new LossAccumulator(model.device, model.parallel.tp.rank === 0);
	for (const microbatch of microbatches) {
		const tape = new Tape(model.device, { recording: false });
		using input = new DeviceInput(model.device, microbatch, model.parallel.tp);
		using logits = model.forward(tape, input.forward(0, 0), options.observe);
		using loss = tokenLoss(tape, model, logits, input.labels);
		losses.add(loss, input.mask);
	}
	const { sum, tokens } = losses.total(options.world ?? groupOfOne("world", 0));
	return { loss: sum / Math.max(1, tokens), tokens };
}
