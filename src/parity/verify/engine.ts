/** One rank's part of a training run on a layout, as verify looks at it: steps, gradients, weights, routing. */

import { firstCopyCounts } from "../../checkpoint/gathered-store.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import { HybridModel } from "../../models/hybrid/model.ts";
import { EncoderModule } from "../../models/mimo/encoder.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import { AdamW } from "../../optim/adamw.ts";
import { StepScalars } from "../../optim/step-scalars.ts";
import { onlyReplica } from "../../parallel/data-parallel.ts";
import { type Group, groupOfOne } from "../../parallel/group.ts";
import type { World } from "../../parallel/world.ts";
import { ColocatedSchedule } from "../../train/colocated-schedule.ts";
import type { LossAccumulator } from "../../train/loss.ts";
import { mimoSide } from "../../train/mimo-run.ts";
import type { Participation } from "../../train/participation.ts";
import type { Schedule, StepPlace } from "../../train/schedule.ts";
import { type StepResult, type TrainingState, trainStep } from "../../train/step.ts";
import { colocatedMicrobatches, encoderMicrobatches, languageMicrobatches, type Plan } from "./plan.ts";
import { RoutingRecorder } from "./routing.ts";
import type { Subject } from "./subject.ts";

export interface EngineOptions {
	/** ZeRO-1. */
	readonly distributedOptimizer?: boolean;
	/** Gradients are reduced in small buckets while backward runs. */
	readonly buckets?: boolean;
	/** encoder-grad-participation; default exact. */
	readonly participation?: Participation["policy"];
	/** Layout 1: microbatches last to first, so that sums come in another order. */
	readonly reversed?: boolean;
}

export interface Engine extends Disposable {
	readonly world: Group;
	readonly state: Pick<TrainingState<never>, "replicas" | "optimizer" | "scalars">;
	/** What the routers of this rank chose in the last step. */
	readonly routing: RoutingRecorder;
	/** Draws the initial weights and forgets what the optimizer knows. */
	restart(): void;
	/** The next step on the subject's batch; `gradients` is called when they are final, before clipping. */
	step(gradients?: () => void): StepResult;
	/** This rank's part of every tensor it holds. The receiver disposes them. */
	tensors(): Iterable<LogicalTensor>;
	/** Whether this rank's part of a tensor is the one that counts: of equal copies only one does. */
	counts(tensor: LogicalTensor): boolean;
}

/** Every rank of the layout calls this together. */
export async function openEngine(
	world: World,
	plan: Plan,
	subject: Subject,
	options: EngineOptions = {},
): Promise<Engine> {
	return plan.topology.colocated
		? colocatedEngine(world, plan, subject, options)
		: await bridgedEngine(world, plan, subject, options);
}

function colocatedEngine(world: World, plan: Plan, subject: Subject, options: EngineOptions): Engine {
	const { reversed = false, participation = "exact" } = options;
	const { device } = world;
	const encoder = new EncoderModule(device, subject.encoder, {
		frozenTower: subject.frozen.tower,
		frozenProjector: subject.frozen.projector,
	});
	const language = new HybridModel(device, subject.language, { frozen: subject.frozen.language });
	const [encoderReplica, languageReplica] = [onlyReplica(encoder.parameters), onlyReplica(language.parameters)];
	const replicas = [encoderReplica, languageReplica];
	const scalars = new StepScalars(device);
	const optimizer = new AdamW(replicas, scalars, subject.adam);
	const schedule = new ColocatedSchedule(encoder, language, subject.imageTokenId);
	const routing = new RoutingRecorder(language, reversed ? "last first" : "first first");
	const state: TrainingState<ImageTextMicrobatch> = {
		replicas,
		routers: [...language.routers.values()],
		routerGroup: groupOfOne("language.tp_dp", 0),
		world: groupOfOne("world", 0),
		schedule: reversed ? new Reversed(schedule) : schedule,
		countsLoss: true,
		optimizer,
		scalars,
		clipGrad: subject.clipGrad,
		seed: subject.seed,
		participation: { policy: participation, ranks: 1, replica: encoderReplica, votes: true },
	};
	const initialise = () => {
		encoder.initialise(subject.seed);
		language.initialise(subject.seed);
	};
	const microbatches = colocatedMicrobatches(plan, subject.samples);
	const base = engineOf(state, subject, { routing, initialise, microbatches, firstToken: 0 });
	return {
		...base,
		*tensors() {
			yield* encoder.logicalTensors();
			yield* language.logicalTensors();
		},
		counts: () => true,
		[Symbol.dispose]: () => {
			for (const owned of [optimizer, scalars, language, encoder]) owned[Symbol.dispose]();
		},
	};
}

async function bridgedEngine(world: World, plan: Plan, subject: Subject, options: EngineOptions): Promise<Engine> {
	const { topology } = plan;
	const side = await mimoSide(world, topology, {
		...subject,
		distributedOptimizer: options.distributedOptimizer ?? false,
		buckets: () => (options.buckets ? { count: 8 } : null),
		participation: options.participation ?? "exact",
	});
	const { lane } = side;
	const initialise = () => side.initialise(subject.seed);
	const { replicas, model } = side.groups;
	const base = () => {
		if (side.module === "language") {
			const microbatches = languageMicrobatches(plan, subject.samples, lane);
			const firstToken = lane * plan.microbatches * plan.microBatchSize * subject.sequenceLength;
			const routing = new RoutingRecorder(side.model, "first first");
			return engineOf(side.state, subject, { routing, initialise, microbatches, firstToken });
		}
		const microbatches = encoderMicrobatches(plan, subject.samples, lane);
		const routing = new RoutingRecorder(null, "first first");
		return engineOf(side.state, subject, { routing, initialise, microbatches, firstToken: 0 });
	};
	return {
		...base(),
		tensors: () => side.logicalTensors(),
		counts: firstCopyCounts({ ...replicas, tensor: model.tp }),
		[Symbol.dispose]: () => {
			for (const owned of side.owned) owned[Symbol.dispose]();
		},
	};
}

function engineOf<Batch>(
	state: TrainingState<Batch>,
	subject: Subject,
	own: {
		readonly routing: RoutingRecorder;
		readonly initialise: () => void;
		readonly microbatches: readonly Batch[];
		readonly firstToken: number;
	},
) {
	const { optimizer, scalars } = state;
	const { routing, microbatches, firstToken } = own;
	let iteration = 0;
	return {
		world: state.world,
		state,
		routing,
		restart() {
			iteration = 0;
			own.initialise();
			for (const { expAvg, expAvgSq } of optimizer.shards) {
				for (const moment of [expAvg, expAvgSq]) scalars.device.setZero(moment, moment.bytes);
			}
			scalars.device.setZero(scalars.step, scalars.step.bytes);
			optimizer.refreshMasters();
		},
		step(gradients: () => void = () => {}) {
			routing.clear();
			const { learningRate, weightDecay } = subject;
			const input = { microbatches, firstToken, iteration: iteration++, learningRate, weightDecay };
			return trainStep(state, input, { gradients });
		},
	};
}

/** The microbatches of a step from the last to the first, each told its own place. */
class Reversed implements Schedule<ImageTextMicrobatch> {
	constructor(readonly schedule: ColocatedSchedule) {}

	run(microbatches: readonly ImageTextMicrobatch[], place: StepPlace, losses: LossAccumulator): void {
		let end = place.firstToken + microbatches.reduce((sum, { text }) => sum + text.ids.length, 0);
		for (const microbatch of microbatches.toReversed()) {
			end -= microbatch.text.ids.length;
			this.schedule.run([microbatch], { ...place, firstToken: end }, losses);
		}
	}
}
