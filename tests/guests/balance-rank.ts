/**
 * Rank program of balance.test.ts: one step on the same samples with encoder lanes that share images by number and by
 * cost. Prints on every rank how the loss and the gradients differ, and what moved between lanes.
 */
import { configurationOf } from "../../src/config/resolve.ts";
import { balanceOf } from "../../src/guests/balance/balance.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { openEngine } from "../../src/parity/verify/engine.ts";
import { planOf } from "../../src/parity/verify/samples.ts";
import { subjectOf } from "../../src/parity/verify/subject.ts";
import { deviceOfRank, placeOfRank } from "../parallel/ranks.ts";
import { relativeRms } from "../support.ts";

const [layout, flags] = process.argv.slice(2) as [string, string];
const place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const subject = subjectOf(
	configurationOf({
		preset: "nemotron-vlm-tiny",
		"dynamic-resolution": true,
		"img-h": 64,
		"img-w": 64,
		"seq-length": 64,
		"global-batch-size": 8,
		...(JSON.parse(flags) as Record<string, string | number | boolean>),
	}),
	2,
);
const plan = planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length });

/** `fit`: what a checkpoint kept of measured times. */
async function step(encoderBalance: "number" | "cost", fit: number[] | null = null) {
	const guests = [balanceOf({ encoderBalance })]
		.filter((guest) => guest !== null)
		.map((guest) => ({
			...guest,
			open: (...given: Parameters<typeof guest.open>) => {
				const opened = guest.open(...given);
				if (fit !== null) opened?.restore?.({ "encoder-cost": fit });
				return opened;
			},
		}));
	using engine = await openEngine(world, plan, { ...subject, guests });
	engine.restart();
	let moved = 0;
	const lanes = engine.state.participation?.replica?.groups.dense;
	if (lanes) {
		const allToAll = lanes.allToAll.bind(lanes);
		lanes.allToAll = (send, from, receive, to) => {
			moved += from.counts.reduce((sum, rows, lane) => sum + (lane === lanes.rank ? 0 : rows), 0);
			return allToAll(send, from, receive, to);
		};
	}
	const before = device.memoryStatistics().liveBytes;
	const { loss } = engine.step(() => {
		for (const replica of engine.state.replicas) replica.gatherGradients();
	});
	const gradients = new Map<string, Float32Array>();
	for (const { name, value, gradient } of engine.tensors()) {
		if (gradient) gradients.set(name, gradient.toFloat32());
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	return { loss, gradients, moved, left: device.memoryStatistics().liveBytes - before };
}

const number = await step("number");
const cost = await step("cost");
// By their number: every image costs the same.
const fitted = await step("cost", [0, 0, 1]);
const apart = [...number.gradients].map(([name, gradient]) => relativeRms(cost.gradients.get(name)!, gradient));
console.log(
	JSON.stringify({
		loss: Math.max(Math.abs(cost.loss - number.loss), Math.abs(fitted.loss - number.loss)),
		gradient: Math.max(...apart),
		compared: apart.length,
		moved: cost.moved,
		movedByNumber: number.moved,
		movedByFit: fitted.moved,
		left: Math.max(cost.left, fitted.left) - number.left,
	}),
);
