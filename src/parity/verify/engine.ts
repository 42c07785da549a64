/** A training run on a layout for `mimo verify`, on one rank: steps, gradients, weights, routing. */
import type { LayerProbe } from "../../models/language/layer-context.ts";
import type { HybridModel } from "../../models/language/model.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import type { Group, World } from "../../parallel/index.ts";
import { TokenSlice } from "../../tensor/index.ts";
import { assemble } from "../../train/assemble.ts";
import type { Participation } from "../../train/participation.ts";
import { trainStep } from "../../train/step.ts";
import type { StepResult, TrainingState } from "../../train/step-state.ts";
import { RoutingRecorder } from "./routing.ts";
import { dealtTo, type Plan } from "./samples.ts";
import { type Subject, specificationOn, type WorkOrder } from "./subject.ts";

export interface EngineOptions {
	/** ZeRO-1. */
	readonly distributedOptimizer?: boolean;
	/** Gradients are reduced in small buckets while backward runs. */
	readonly buckets?: boolean;
	/** encoder-grad-participation; default exact. */
	readonly participation?: Participation["policy"];
	/** Default: the subject's. */
	readonly order?: WorkOrder;
	/** Whether microbatches run last to first, which adds in another order. */
	readonly reversed?: boolean;
}

export interface Engine extends Disposable {
	readonly world: Group;
	readonly state: TrainingState;
	/** Choices of this rank's routers in the last step. */
	readonly routing: RoutingRecorder;
	/** Draws the initial weights and resets the optimizer's state. */
	restart(): void;
	/** The next step on the subject's batch; `gradients` is called when they are final, before clipping. */
	step(gradients?: () => void): StepResult;
	/** This rank's part of every tensor it holds. The receiver disposes them. */
	tensors(): Iterable<LogicalTensor>;
	/** Observes the layers of this rank's part of the language model from now on; null: no longer. */
	observe(probe: ((model: HybridModel) => LayerProbe) | null): void;
	/** Whether this rank's copy of a tensor part counts; of equal copies exactly one does. */
	counts(tensor: LogicalTensor): boolean;
}

/** Every rank of the layout calls this together. */
export async function openEngine(
	world: World,
	plan: Plan,
	subject: Subject,
	options: EngineOptions = {},
): Promise<Engine> {
	const { distributedOptimizer = false, buckets = false, participation = "exact", reversed = false } = options;
	const { topology } = plan;
	const specification = {
		...specificationOn(subject, topology),
		encoders: subject.encoders.map((encoder) => ({ ...encoder, participation: { policy: participation } })),
		distributedOptimizer,
		buckets: () => (buckets ? { count: 8 } : null),
		...(options.order ?? subject.order),
	};
	const run = await assemble(specification, topology, world);
	const { state } = run;
	const { optimizer, scalars } = state;
	const routing = new RoutingRecorder(run.language, reversed ? "last first" : "first first");
	const lane = run.language ? topology.language.coordinates(world.rank).dp : 0;
	const input = inOrder(dealtTo(world.rank, plan, subject.samples), lane, reversed);
	let iteration = 0;
	return {
		world: state.world,
		state,
		routing,
		restart() {
			iteration = 0;
			run.initialise(subject.seed);
			for (const { module, trained } of run.guests.flatMap(({ modules = [] }) => modules))
				if (trained === null) module.initialise(subject.seed + 1);
			for (const { states } of optimizer.shards) {
				for (const state of states.values()) scalars.device.setZero(state, state.bytes);
			}
			scalars.device.setZero(scalars.step, scalars.step.bytes);
			optimizer.refreshMasters();
		},
		step(gradients) {
			routing.clear();
			const { learningRate, weightDecay } = subject;
			return trainStep(
				state,
				{ ...input, iteration: iteration++, learningRate, weightDecay },
				gradients && { gradients },
			);
		},
		tensors: () => run.logicalTensors(),
		observe(probe) {
			if (run.language) run.language.probe = probe?.(run.language) ?? null;
		},
		counts: (tensor) => run.counts(tensor),
		[Symbol.dispose]: () => run[Symbol.dispose](),
	};
}

/** Microbatches first to last or last to first, each with its own tokens of the global batch. */
function inOrder(microbatches: ReturnType<typeof dealtTo>, lane: number, reversed: boolean) {
	const lengths = microbatches.map(({ text }) => text.ids.length);
	let first = lane * lengths.reduce((sum, length) => sum + length, 0);
	const ranges = lengths.map((count) => {
		first += count;
		return { first: first - count, count };
	});
	return reversed
		? { microbatches: microbatches.toReversed(), tokens: new TokenSlice(ranges.toReversed()) }
		: { microbatches, tokens: new TokenSlice(ranges) };
}
