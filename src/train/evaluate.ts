/** The loss without training: dropout is off, routers do not count. */
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/group.ts";
import { LossAccumulator } from "./loss.ts";
import type { Evaluator, MicrobatchObserver } from "./schedule.ts";

/** What evaluation needs of a training's state. */
export interface EvaluationState<Batch> {
	readonly device: Device;
	/** Whose losses make up the mean: every rank of the run. */
	readonly world: Group;
	readonly evaluator: Evaluator<Batch>;
	/** Whether this rank's losses count. */
	readonly countsLoss: boolean;
}

/** Mean loss of a token over the microbatches of every rank; all call this together. */
export function evaluate<Batch>(
	{ device, world, evaluator, countsLoss }: EvaluationState<Batch>,
	microbatches: readonly Batch[],
	observe?: MicrobatchObserver,
): { loss: number; tokens: number } {
	using losses = new LossAccumulator(device, countsLoss);
	evaluator.evaluate(microbatches, losses, observe);
	const { sum, tokens } = losses.total(world);
	return { loss: sum / Math.max(1, tokens), tokens };
}
