/** Held-out pictures in the event "samples" of a log: what the data say of them, and what the model wrote. */
import type { RunEvent } from "../step-report.ts";

/** A sample in an event. */
export interface SampleRecord {
	/** A PNG file in base64; null: the sample has no picture, or the log holds none. */
	readonly picture: string | null;
	readonly prompt: string;
	readonly truth: string;
	readonly answer: string;
}

/** Most samples of an event, characters of a text, and characters of a picture. */
export const mostSamples = 12;
const [longest, largest] = [2000, 2 ** 19];

const shortened = (text: string) => (text.length > longest ? `${text.slice(0, longest)} …` : text);

/** The event with the first samples that were answered after `step` steps; `sentence`: how many were right. */
export function samplesEvent(step: number, sentence: string, samples: readonly SampleRecord[]): RunEvent {
	const kept = samples.slice(0, mostSamples).map(({ picture, prompt, truth, answer }) => ({
		picture: picture !== null && picture.length <= largest ? picture : null,
		...{ prompt: shortened(prompt), truth: shortened(truth), answer: shortened(answer) },
	}));
	return { kind: "samples", step, sentence, details: { samples: kept } };
}

/** The samples of an event in a log. Records of another form are ignored. */
export function samplesOf(samples: unknown): SampleRecord[] {
	if (!Array.isArray(samples)) return [];
	return samples.slice(0, mostSamples).flatMap((one: Partial<Record<keyof SampleRecord, unknown>> | null) => {
		const { picture, prompt, truth, answer } = one ?? {};
		if (typeof prompt !== "string" || typeof truth !== "string" || typeof answer !== "string") return [];
		const isPicture = typeof picture === "string" && picture.length <= largest && /^[A-Za-z\d+/]+={0,2}$/.test(picture);
		const texts = { prompt: shortened(prompt), truth: shortened(truth), answer: shortened(answer) };
		return [{ picture: isPicture ? picture : null, ...texts }];
	});
}
