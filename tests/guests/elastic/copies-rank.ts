/**
 * Rank program of copies.test.ts: trains the family for some steps on a layout and prints the loss and norms of the first step, what its
 * microbatches drew, and a digest of the router's weights after the last.
 */
import { createHash } from "node:crypto";
import { withoutImages } from "../../../src/data/microbatch.ts";
import { RankElastic } from "../../../src/guests/elastic/elastic.ts";
import { trainStep } from "../../../src/train/step.ts";
import { text } from "./family-model.ts";
import { FamilyRank } from "./family-run.ts";

const [layout, keys, steps] = process.argv.slice(2) as [string, string, string];
const adam = { beta1: 0.9, beta2: 0.95, epsilon: 1e-6 };
using rank = await FamilyRank.open(layout, JSON.parse(keys), { clipGrad: 1, adam });
const { family, world, run } = rank;
const elasticOfRank = run.guests.find((guest) => guest instanceof RankElastic)!;
// Three microbatches a step, each with a draw of its own.
const microbatches = [0, 1, 2].map((shift) =>
	withoutImages({ ...text.text, ids: text.text.ids.map((id) => (id + 5 * shift) % 61) }),
);
const drawn = microbatches.map((_, microbatch) => {
	const { budget, hard, noise } = elasticOfRank.draw(0, microbatch);
	return { budget, hard, noise: [...Float64Array.from(noise!(family.elastic.axes[0]!))] };
});
let first: unknown = null;
for (let iteration = 0; iteration < Number(steps); iteration++) {
	const result = trainStep(run.state, { microbatches, iteration, learningRate: 1e-3, weightDecay: 0 });
	first ??= { loss: result.losses["lm loss"], budgetLoss: result.losses["budget loss"], norm: result.gradientNorm };
	world.progress(iteration + 1);
}
const digest = createHash("sha256");
for (const { value } of elasticOfRank.router.parameters) digest.update(new Uint8Array(value.toFloat32().buffer));
console.log(JSON.stringify({ first, drawn, weights: digest.digest("hex") }));
