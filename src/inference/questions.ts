/**
 * Questions with known answers, a record a line of JSONL: `prompt` or `messages`, with images as for requests, and `answer` (a
 * text, or several as `answers`), or `choices` that include `answer`: its text, its number from 0, or its letter.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { type Request, readJsonl, requestOf } from "./requests.ts";

export type Question = { readonly request: Request } & (
	| { readonly kind: "exact"; readonly answers: readonly string[] }
	| { readonly kind: "choice"; readonly choices: readonly string[]; readonly right: number }
);

/** Reads a file of questions. Throws a UserError that names a line that is not a question. */
export function readQuestions(path: string, chat: boolean): Question[] {
	return Array.from(readJsonl(path), (line) => {
		const request = requestOf(line, path, chat);
		const { answer, answers, choices } = line.record;
		if (choices === undefined) {
			const allowed = [answers ?? answer ?? []].flat().map(String);
			if (allowed.length === 0) throw new UserError(`${line.name} has no answer.`);
			return { request, kind: "exact", answers: allowed };
		}
		if (!Array.isArray(choices) || choices.length < 2) {
			throw new UserError(`${line.name}: choices are a list of at least two texts.`);
		}
		const texts = choices.map(String);
		const right = rightOne(texts, answer);
		if (right === null) {
			throw new UserError(
				`${line.name}: answer is ${JSON.stringify(answer)}; it is the text, the number from 0 or the letter of one of ${counted(choices.length, "choice")}.`,
			);
		}
		return { request, kind: "choice", choices: texts, right };
	});
}

function rightOne(choices: readonly string[], answer: unknown): number | null {
	const byText = choices.indexOf(String(answer));
	const place =
		typeof answer === "number"
			? answer
			: byText >= 0
				? byText
				: /^[A-Z]$/.test(String(answer))
					? String(answer).charCodeAt(0) - 65
					: -1;
	return Number.isInteger(place) && place >= 0 && place < choices.length ? place : null;
}

/** Whether an answer equals one of the allowed answers, ignoring surrounding space. */
export function isRight(text: string, answers: readonly string[]): boolean {
	return answers.some((answer) => answer.trim() === text.trim());
}
