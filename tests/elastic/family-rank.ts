/**
 * Rank program of family.test.ts: logits of a masked parent on a layout at every budget of routers of several seeds, one after
 * the other, in the file OUTPUT.RANK on ranks of the last stage: f32 [choices, tokens, this rank's columns].
 */
import { writeFileSync } from "node:fs";
import { segmentLengths } from "../../src/config/pipeline.ts";
import { withoutNoise } from "../../src/elastic/router-network.ts";
import { segmentsOf } from "../../src/models/hybrid/segments.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { assemble } from "../../src/train/assemble.ts";
import { Losses } from "../../src/train/losses.ts";
import { deviceOfRank, placeOfRank } from "../parallel/ranks.ts";
import { budgets, expertBias, familyOf, parentSeed, text } from "./family-model.ts";

const [layout, keys, seeds, output] = process.argv.slice(2) as [string, string, string, string];
const { topology } = namedTopology(parseLayout(layout));
const { tensor, pipeline } = topology.language.shape;
const { c, model, elastic } = familyOf({ ...JSON.parse(keys), "llm-tp": tensor });
const place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
using run = await assemble(
	{
		...{ encoder: null, imageTokenId: null, clipGrad: 0, seed: 1, language: model, elastic: { config: elastic } },
		segments: segmentsOf(segmentLengths(c.hybridLayerPattern, pipeline)),
		frozen: { tower: true, projector: true, language: true },
		adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 },
	},
	topology,
	world,
);
run.initialise(parentSeed);
for (const router of run.language!.routers.values()) device.copyToDevice(router.expertBias, expertBias);
const { state } = run;
const found: Float32Array[] = [];
for (let seed = 0; seed < Number(seeds); seed++) {
	run.elastic!.initialise(seed);
	for (const value of budgets) {
		const draw = withoutNoise({ value, parent: value === 1 });
		using sampled = run.elastic!.sample([draw], 9, { trains: false });
		using losses = new Losses(device, state.lossOwner, state.lossNames);
		const keep = (name: string, logits: { toFloat32: () => Float32Array }) => {
			if (name === "logits") found.push(logits.toFloat32());
		};
		state.passes.evaluate([text], losses, keep, sampled.microbatches);
	}
	world.progress(seed + 1);
}
const bytes = found.map((values) => new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
if (bytes.length > 0) writeFileSync(`${output}.${place.rank}`, Buffer.concat(bytes));
