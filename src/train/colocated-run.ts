/** A run in which one process holds encoder and language model. */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { EncoderModule } from "../models/mimo/encoder.ts";
import { encoderConfig } from "../models/mimo/from-configuration.ts";
import { AdamW } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { onlyReplica } from "../parallel/data-parallel.ts";
import { groupOfOne } from "../parallel/group.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { ColocatedSchedule } from "./colocated-schedule.ts";
import type { TrainingRun } from "./training-run.ts";

export function colocatedRun(
	c: TrainingConfiguration,
	topology: Topology,
	{ device, rank }: World,
): TrainingRun<ImageTextMicrobatch> {
	const encoder = new EncoderModule(device, encoderConfig(c), {
		frozenTower: c.freezeVit,
		frozenProjector: c.freezeProjection,
	});
	const language = new HybridModel(device, hybridConfig(c), { frozen: c.freezeLm });
	const [encoderReplica, languageReplica] = [onlyReplica(encoder.parameters), onlyReplica(language.parameters)];
	const replicas = [encoderReplica, languageReplica];
	const scalars = new StepScalars(device);
	const optimizer = new AdamW(replicas, scalars, { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps });
	const encoderTrains = !c.freezeVit || !c.freezeProjection;
	return {
		topology,
		rank,
		encoder,
		language,
		groups: null,
		state: {
			replicas,
			routers: [...language.routers.values()],
			routerGroup: groupOfOne("language.tp_dp", 0),
			world: groupOfOne("world", 0),
			schedule: new ColocatedSchedule(encoder, language, c.imageTokenId, encoderTrains),
			countsLoss: true,
			optimizer,
			scalars,
			clipGrad: c.clipGrad,
			seed: c.seed,
			participation: { policy: c.encoderGradParticipation, ranks: 1, replica: encoderReplica, votes: true },
			logNumZeros: c.logNumZerosInGrad,
			logParametersNorm: c.logParamsNorm,
		},
		batchOf: (microbatch) => microbatch,
		initialise(seed) {
			encoder.initialise(seed);
			language.initialise(seed);
		},
		*logicalTensors() {
			yield* encoder.logicalTensors();
			yield* language.logicalTensors();
		},
		[Symbol.dispose]() {
			for (const owned of [optimizer, scalars, language, encoder]) owned[Symbol.dispose]();
		},
	};
}
