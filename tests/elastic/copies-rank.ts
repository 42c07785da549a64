/**
 * Rank program of copies.test.ts: trains the family for some steps on a layout and prints the loss and norms of the first step, what its
 * microbatches drew, and a digest of the router's weights after the last.
 */
import { createHash } from "node:crypto";
import { segmentLengths } from "../../src/config/pipeline.ts";
import { withoutImages } from "../../src/data/microbatch.ts";
import { segmentsOf } from "../../src/models/hybrid/segments.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { assemble } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import { deviceOfRank, placeOfRank } from "../parallel/ranks.ts";
import { familyOf, parentSeed, text } from "./family-model.ts";

const [layout, keys, steps] = process.argv.slice(2) as [string, string, string];
const { topology } = namedTopology(parseLayout(layout));
const { tensor, pipeline } = topology.language.shape;
const { c, model, elastic } = familyOf({ ...JSON.parse(keys), "llm-tp": tensor });
const place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
using run = await assemble(
	{
		...{ encoder: null, imageTokenId: null, clipGrad: 1, seed: 1, language: model, elastic: { config: elastic } },
		segments: segmentsOf(segmentLengths(c.hybridLayerPattern, pipeline)),
		frozen: { tower: true, projector: true, language: false },
		adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-6 },
	},
	topology,
	world,
);
run.initialise(parentSeed);
// Three microbatches a step, each with a draw of its own.
const microbatches = [0, 1, 2].map((shift) =>
	withoutImages({ ...text.text, ids: text.text.ids.map((id) => (id + 5 * shift) % 61) }),
);
const drawn = microbatches.map((_, microbatch) => {
	const { budget, hard, noise } = run.state.elastic!.draw(0, microbatch);
	return { budget, hard, noise: [...Float64Array.from(noise!(elastic.axes[0]!))] };
});
let first: unknown = null;
for (let iteration = 0; iteration < Number(steps); iteration++) {
	const result = trainStep(run.state, { microbatches, iteration, learningRate: 1e-3, weightDecay: 0 });
	first ??= { loss: result.losses["lm loss"], budgetLoss: result.losses["budget loss"], norm: result.gradientNorm };
	world.progress(iteration + 1);
}
const digest = createHash("sha256");
for (const { value } of run.elastic!.parameters) digest.update(new Uint8Array(value.toFloat32().buffer));
console.log(JSON.stringify({ first, drawn, weights: digest.digest("hex") }));
