/** What two runs' numbers and tensors have to be to each other: equal bit for bit, or up to the order of sums. */
import { type Step, Wrong } from "./case.ts";

/** Numbers of a step by their names, those in lists and objects included. */
export function numbersOf(value: unknown, name = ""): [name: string, number: number][] {
	if (typeof value === "number") return [[name, value]];
	if (typeof value !== "object" || value === null) return [];
	return Object.entries(value).flatMap(([key, inner]) => numbersOf(inner, name === "" ? key : `${name} ${key}`));
}

/** Throws Wrong unless both logs have the same steps, bit for bit. `only`: fields of the first that count; absent: all. */
export function requireEqual(what: string, expected: readonly Step[], found: readonly Step[]): void {
	if (expected.length !== found.length) {
		throw new Wrong(`${what}: ${found.length} lines of the log instead of ${expected.length}`);
	}
	expected.forEach((step, at) => {
		for (const [name, value] of Object.entries(step)) {
			const [a, b] = [JSON.stringify(value), JSON.stringify(found[at]![name])];
			if (a !== b) throw new Wrong(`${what}: ${name} of step ${step.iteration} is ${b} instead of ${a}`);
		}
	});
}

/**
 * Relative differences that sums in another order cause, of a loss and of a gradient norm. A divergence is a difference of
 * two losses: its own is relative to these.
 */
const limits = { loss: 1e-4, grad_norm: 2e-3 };

/**
 * Throws Wrong unless both logs have the same steps up to rounding. Returns false from the step on in which a tie between
 * two experts was decided otherwise.
 */
export function requireNear(what: string, expected: readonly Step[], found: readonly Step[]): boolean {
	if (expected.length !== found.length) {
		throw new Wrong(`${what}: ${found.length} lines of the log instead of ${expected.length}`);
	}
	for (const [at, step] of expected.entries()) {
		const other = found[at]!;
		if (JSON.stringify(step.tokens_per_expert) !== JSON.stringify(other.tokens_per_expert)) {
			if (at > 0) return false;
			const [a, b] = [step, other].map((s) => numbersOf(s.tokens_per_expert).map(([, count]) => count));
			const moved = a!.reduce((sum, count, i) => sum + Math.abs(count - b![i]!), 0);
			// One token that goes elsewhere is a tie.
			if (moved > 2) throw new Wrong(`${what}: experts of step 1 get ${b} tokens instead of ${a}`);
			return false;
		}
		for (const [name, value] of Object.entries(step)) {
			if (!/loss|grad_norm(_exact)?$|tokens$|samples$|learning_rate/.test(name) || typeof value !== "number") continue;
			const limit = name === "grad_norm" ? limits.grad_norm : limits.loss;
			const size = Math.abs(Number(name.includes("distillation") ? step["lm loss"] : value));
			const number = other[name];
			if (typeof number === "number" && Math.abs(number - value) <= limit * Math.max(size, 1e-6)) continue;
			throw new Wrong(`${what}: ${name} of step ${step.iteration} is ${number} instead of ${value}`);
		}
	}
	return true;
}

/** Throws Wrong unless two lists of digests are the same. */
export function requireSame(what: string, expected: Record<string, string>, found: Record<string, string>): void {
	const names = new Set([...Object.keys(expected), ...Object.keys(found)]);
	const different = [...names].filter((name) => expected[name] !== found[name]);
	if (different.length > 0) {
		throw new Wrong(
			`${what}: ${different.length} of ${names.size} tensors differ, such as ${different.slice(0, 3).join(", ")}`,
		);
	}
}

/** Throws Wrong unless two losses of the same samples differ by rounding alone. */
export function requireClose(what: string, expected: number, found: number | undefined, limit = limits.loss): void {
	if (found !== undefined && Math.abs(found - expected) <= limit * Math.max(Math.abs(expected), 1e-6)) return;
	throw new Wrong(`${what} is ${found} instead of ${expected}`);
}
