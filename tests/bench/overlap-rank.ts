/**
 * Rank program of overlap.ts: rank 0 is an encoder, rank 1 a language model, of about equal work. Prints both sides'
 * seconds of eight microbatches forward and backward by themselves, at the same time, and of a step.
 */
import { configurationOf } from "../../src/config/resolve.ts";
import { placesInStep } from "../../src/data/images.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { dealtTo, planOf } from "../../src/parity/verify/samples.ts";
import { type Subject, specificationOn, subjectOf } from "../../src/parity/verify/subject.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { assemble, type Run } from "../../src/train/assemble.ts";
import { EncoderPass } from "../../src/train/encoder-pass.ts";
import { LanguagePass } from "../../src/train/language-pass.ts";
import { Losses } from "../../src/train/losses.ts";
import { trainStep } from "../../src/train/step.ts";
import { placeOfRank } from "../parallel/ranks.ts";

using place = await placeOfRank();
using device = Device.open(await openLibrary("cpu"), { threads: 1 });
using world = World.join(device, place.run, place.rank, place.backend);
const layout = namedTopology(parseLayout("1+1"));
const everyone = await world.group("world", [0, 1]);
const repetitions = 25;

const subjectWith = (ffnHiddenSize: number): Subject =>
	subjectOf(
		configurationOf({
			preset: "nemotron-vlm-tiny",
			"vision-num-layers": 3,
			"vision-hidden-size": 64,
			"vision-ffn-hidden-size": ffnHiddenSize,
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
	readonly run: Run;
	/** Eight microbatches without the other side. */
	readonly alone: () => void;
	readonly step: () => void;
}

async function open(subject: Subject): Promise<Work> {
	const plan = planOf(layout, { ...subject, samples: subject.samples.length });
	const run = await assemble(specificationOn(subject, layout.topology), layout.topology, world);
	run.initialise(1);
	const microbatches = dealtTo(world.rank, plan, subject.samples);
	const about = { microbatches, iteration: 0, learningRate: 0, weightDecay: 0 };
	const step = () => void trainStep(run.state, about);
	const { encoder, language } = run;
	if (encoder) {
		const alone = () => {
			for (const images of placesInStep(microbatches.map(({ features }) => features.radio_encoder!))) {
				using encoded = new EncoderPass(encoder, images, { cropKey: 0, training: true });
				encoded.backward(Tensor.zeros(device, encoded.output.rows.shape), "immediate");
			}
		};
		return { run, alone, step };
	}
	const [vision] = subject.encoders as [(typeof subject.encoders)[number]];
	const placeholders = new Map([[vision.parts.name, vision.placeholderId]]);
	const alone = () => {
		using losses = new Losses(device, run.state.lossOwner);
		for (const { text } of microbatches) {
			const count = text.ids.filter((id) => id === vision.placeholderId).length;
			const rows = Tensor.zeros(device, [count, subject.language.hiddenSize]);
			const tokens = TokenSlice.of(0, text.ids.length);
			const about = { placeholders, microbatch: 0, guests: [], dropoutKey: 0, tokens };
			const options = { ...about, pooled: null, training: true };
			const chunk = (module: string) => ({ module, index: 0 });
			const edge = { from: chunk(vision.parts.name), to: chunk("language") };
			const received = [{ edge, rows: { rows, rowsPerSample: [count] }, returns: true }];
			using pass = new LanguagePass(language!, language!.chunks[0]!, text, received, losses, options);
			pass.forward();
			const back = pass.backward(null, "immediate");
			if (back.finished) for (const one of back.gradients) one?.[Symbol.dispose]();
		}
	};
	return { run, alone, step };
}

/** Seconds of encoder and language model. */
type Sides = readonly [encoder: number, language: number];

/**
 * Times each, in turns, both ranks beginning together; of every one the repetition whose slower side took least: what
 * disturbs a machine only adds, and a side that is fast because the other one was held up shows nothing.
 */
function time<Name extends string>(works: Readonly<Record<Name, () => void>>): Record<Name, Sides> {
	const names = Object.keys(works) as Name[];
	for (const name of names) works[name]();
	const micros = Object.fromEntries(names.map((name) => [name, [] as number[]])) as Record<Name, number[]>;
	for (let repetition = 0; repetition < repetitions; repetition++) {
		for (const name of names) {
			everyone.barrier();
			const start = performance.now();
			works[name]();
			micros[name].push(Math.round((performance.now() - start) * 1000));
		}
	}
	const least = (name: Name): Sides => {
		const [encoder, language] = everyone.exchange(Int32Array.from(micros[name]));
		const pairs = Array.from(encoder!, (one, index): Sides => [one / 1e6, language![index]! / 1e6]);
		return pairs.toSorted((a, b) => Math.max(...a) - Math.max(...b))[0]!;
	};
	return Object.fromEntries(names.map((name) => [name, least(name)])) as Record<Name, Sides>;
}

async function aloneWith(ffnHiddenSize: number): Promise<Sides> {
	const trial = await open(subjectWith(ffnHiddenSize));
	const { alone } = time({ alone: trial.alone });
	trial.run[Symbol.dispose]();
	return alone;
}

// The width of the tower's MLPs that makes it as much work as the language model: on the line through two trials.
const widths = [128, 512] as const;
const [narrow, wide] = [await aloneWith(widths[0]), await aloneWith(widths[1])];
const slope = (wide[0] - narrow[0]) / (widths[1] - widths[0]);
const width = widths[0] + ((narrow[1] + wide[1]) / 2 - narrow[0]) / slope;
const ffnHiddenSize = Math.min(2048, Math.max(16, 16 * Math.round(width / 16)));
const equal = await open(subjectWith(ffnHiddenSize));
const times = time({ alone: equal.alone, step: equal.step });
equal.run[Symbol.dispose]();
if (place.rank === 0) console.log(JSON.stringify(times));
