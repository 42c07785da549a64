/**
 * Rank program of overlap.ts: rank 0 is an encoder, rank 1 a language model, of about equal work. Prints this side's
 * median seconds of eight microbatches forward and backward by itself, while the other does the same, and of a step.
 */
import { configurationOf } from "../../src/config/resolve.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { median } from "../../src/observe/median.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { encoderMicrobatches, languageMicrobatches, planOf } from "../../src/parity/verify/plan.ts";
import { type Subject, subjectOf } from "../../src/parity/verify/subject.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import type { BridgedLanguageSchedule, EncoderSchedule } from "../../src/train/bridge-schedule.ts";
import { EncoderMicrobatch } from "../../src/train/encoder-microbatch.ts";
import { trainTextWithImages } from "../../src/train/language-microbatch.ts";
import { LossAccumulator } from "../../src/train/loss.ts";
import { type EncoderSide, type LanguageSide, mimoSide } from "../../src/train/mimo-run.ts";
import { trainStep } from "../../src/train/step.ts";
import { placeOfRank } from "../parallel/ranks.ts";

const place = await placeOfRank();
using device = Device.open(await openLibrary("cpu"), { threads: 1 });
using world = World.join(device, place.run, place.rank);
const layout = namedTopology(parseLayout("1+1"));
const everyone = await world.group("world", [0, 1]);
const repetitions = 9;

const subjectWith = (layers: number): Subject =>
	subjectOf(
		configurationOf({
			preset: "nemotron-vlm-tiny",
			"vision-num-layers": layers,
			"vision-hidden-size": 64,
			"global-batch-size": 8,
			"micro-batch-size": 1,
			"seq-length": 256,
			"dynamic-resolution": false,
			"img-h": 128,
			"img-w": 128,
		}),
		0,
	);

interface Work {
	readonly side: EncoderSide | LanguageSide;
	/** Eight microbatches without the other side. */
	readonly alone: () => void;
	readonly step: () => void;
}

async function open(subject: Subject): Promise<Work> {
	const plan = planOf(layout, { ...subject, samples: subject.samples.length });
	const side = await mimoSide(world, layout.topology, { ...subject, distributedOptimizer: false });
	side.initialise(1);
	const about = { iteration: 0, learningRate: 0, weightDecay: 0 };
	if (side.module === "encoder") {
		const { encoder } = side.state.schedule as EncoderSchedule;
		const microbatches = encoderMicrobatches(plan, subject.samples, 0);
		const alone = () => {
			for (const images of microbatches) {
				using encoded = new EncoderMicrobatch(encoder, images, { cropKey: 0, firstImage: 0 }, { training: true });
				encoded.backward(Tensor.zeros(device, encoded.rows.shape));
			}
		};
		return { side, alone, step: () => void trainStep(side.state, { ...about, microbatches }) };
	}
	const { model, imageTokenId } = side.state.schedule as BridgedLanguageSchedule;
	const microbatches = languageMicrobatches(plan, subject.samples, 0);
	const alone = () => {
		using losses = new LossAccumulator(device, true);
		for (const text of microbatches) {
			const count = text.ids.filter((id) => id === imageTokenId).length;
			using rows = Tensor.zeros(device, [count, subject.language.hiddenSize]);
			const received = { rows, rowsPerSample: [count], wantsGradient: true };
			const step = { dropoutKey: 0, firstToken: 0 };
			trainTextWithImages(model, { text, imageTokenId, name: "bench" }, received, step, losses)?.[Symbol.dispose]();
		}
	};
	return { side, alone, step: () => void trainStep(side.state, { ...about, microbatches }) };
}

/** Median seconds of each, in turns, both ranks beginning together: whatever else the machine does meets all alike. */
function time<Name extends string>(works: Readonly<Record<Name, () => void>>): Record<Name, number> {
	const names = Object.keys(works) as Name[];
	const seconds = Object.fromEntries(names.map((name) => [name, [] as number[]])) as Record<Name, number[]>;
	for (const name of names) works[name]();
	for (let repetition = 0; repetition < repetitions; repetition++) {
		for (const name of names) {
			everyone.barrier();
			const start = performance.now();
			works[name]();
			seconds[name].push((performance.now() - start) / 1000);
		}
	}
	return Object.fromEntries(names.map((name) => [name, median(seconds[name])])) as Record<Name, number>;
}

// Layers of the tower that make it as much work as the language model; a second look corrects the first.
let layers = 8;
for (let look = 0; look < 2; look++) {
	const trial = await open(subjectWith(layers));
	const micros = everyone
		.exchange(Int32Array.of(Math.round(time({ alone: trial.alone }).alone * 1e6)))
		.map(([value]) => value!);
	for (const one of trial.side.owned) one[Symbol.dispose]();
	layers = Math.max(1, Math.round((layers * micros[1]!) / micros[0]!));
}
const equal = await open(subjectWith(layers));
const { alone, step } = time({ alone: equal.alone, step: equal.step });
for (const one of equal.side.owned) one[Symbol.dispose]();
console.log(JSON.stringify({ alone, step, layers }));
