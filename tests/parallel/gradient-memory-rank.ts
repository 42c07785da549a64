/**
 * Rank program of gradient-memory.test.ts: two steps of a vision-language model on a layout, once with NaN in all
 * memory of gradients before each, once without; prints how many parameters end up with other bits.
 */

import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { openEngine } from "../../src/parity/verify/engine.ts";
import { planOf } from "../../src/parity/verify/samples.ts";
import { smallSubject } from "../parity/verify/subject.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const [layout, changes] = process.argv.slice(2) as [string, string];
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const subject = smallSubject(JSON.parse(changes));
const plan = planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length });

/** Weights after two steps, as bits, and the results of the steps. */
async function train(memory: "as it is" | "NaN"): Promise<{ weights: Uint32Array[]; results: unknown[] }> {
	using engine = await openEngine(world, plan, subject, { distributedOptimizer: true });
	engine.restart();
	const buffers = engine.state.replicas.flatMap(({ parameters }) => parameters.buffers);
	const results = [1, 2].map(() => {
		for (const { gradients } of memory === "NaN" ? buffers : []) {
			if (gradients) device.run("fill", { y: gradients, elements: gradients.elements, value: Number.NaN, dtype: 0 });
		}
		return engine.step();
	});
	return { weights: buffers.map(({ values }) => new Uint32Array(values.toFloat32().buffer)), results };
}

const plain = await train("as it is");
const poisoned = await train("NaN");
let different = 0;
for (const [i, weights] of plain.weights.entries()) {
	weights.forEach((bits, at) => {
		if (bits !== poisoned.weights[i]![at]) different++;
	});
}
const elements = plain.weights.reduce((sum, { length }) => sum + length, 0);
console.log(JSON.stringify({ different, elements, plain: plain.results, poisoned: poisoned.results }));
