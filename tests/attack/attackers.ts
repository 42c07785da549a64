/**
 * A run on two hosts, played by this one, while attackers attack the ports of rank 0: before the ranks meet, between
 * the hosts' meeting and the first step, and in training, by turns of about 10 s with rests of about 5 s between them. A step is
 * due every 500 ms. How long after that it has ended is compared over all ranks: of the steps that an attack touched with those
 * of the rests, and the latest with the latest of the run without attackers too, which has the same turns: the rests are too few
 * to hold the latest step that chance makes. So is how long after that the second host's first rank has heard news of rank 0's
 * relay, which is attacked and beats every 200 ms. The first line, of the run without attackers, says how much of a difference is
 * chance. The ranks run in real time where that is allowed (root).
 *
 *   bun tests/attack/attackers.ts [--seconds 120] [--kinds flood,half-open,slow,lying] [--no-timing]
 *
 * --seconds: of attack in training; the run takes half as long again, for the rests. --no-timing: all runs at once, for a test.
 *
 * Prints a line a kind: the steps attacked and at rest; median, 99th percentile and largest lateness of both, of their ends and of
 * the news; by how much of a step the attacked ones were later (in the median, at the 99th percentile or the latest), of ends or of
 * news, whichever is more; the processor time of rank 0 a step (median); the memory that rank 0 took beyond that of the run
 * without attackers; its descriptors; and whether losses and weights of all ranks are equal to that run's to the last bit. Exits
 * with 1 when a kind fails: later by more than a tenth of a step (unless --no-timing), 32 MiB more memory, more than 160
 * descriptors, another result, an attacker that has not connected once.
 *
 * In a run of the product nothing listens in training. Here the relay's port stays open: rank.ts says how.
 */
import { parseArgs } from "node:util";
import { hearingRank, type Outcome, type Played, play, realTime, type Step } from "./played-run.ts";
import { quantile } from "./summary.ts";

const kinds = ["flood", "half-open", "slow", "lying"];
const period = 500;
/** Steps in which processes still compile their code. */
const startUp = 8;
/** Milliseconds after an attack in which the other side may still be closing its connections. */
const aftermath = 250;
const limits = { lateness: 0.1, bytes: 32 << 20, descriptors: 160 };

const { values: flags } = parseArgs({
	options: {
		seconds: { type: "string", default: "120" },
		kinds: { type: "string", default: kinds.join() },
		timing: { type: "boolean", default: true },
	},
	allowNegative: true,
});
const seconds = Number(flags.seconds);
const wanted = flags.kinds.split(",");
if (!(seconds >= 1) || wanted.some((kind) => !kinds.includes(kind))) {
	console.error(`attackers: --seconds is at least 1, --kinds are of ${kinds.join()}`);
	process.exit(2);
}
const played: Played = {
	steps: Math.ceil((1.5 * seconds * 1000) / period) + (flags.timing ? startUp : 0),
	hold: Math.min(5000, Math.max(1000, seconds * 150)),
	period,
	prefix: flags.timing ? realTime() : [],
};

/** Milliseconds after steps were due. */
interface Lateness {
	readonly median: number;
	readonly high: number;
	readonly latest: number;
}

interface Measured {
	readonly steps: number;
	readonly ends: Lateness;
	readonly news: Lateness;
	/** Milliseconds of processor time of rank 0 in a step. */
	readonly processor: number;
}

/** Of the steps that an attack touched, and of the others. */
function compare({ steps, attacks }: Outcome): { readonly attacked: Measured; readonly resting: Measured } {
	const touched = ({ due, done }: Step) =>
		attacks.some(([begin, end]) => due < end + aftermath && Math.max(done, due + period) > begin);
	const counted = steps.filter(({ step }) => step >= startUp);
	return {
		attacked: measure(counted.filter(touched)),
		resting: measure(counted.filter((step) => !touched(step))),
	};
}

function measure(steps: readonly Step[]): Measured {
	const of = (wanted: number) => steps.filter(({ rank }) => rank === wanted);
	return {
		steps: of(0).length,
		ends: latenessOf(steps.map(({ due, ended }) => ended - due)),
		news: latenessOf(of(hearingRank).map(({ due, done }) => done - due)),
		processor: quantile(
			of(0).map(({ processor }) => processor),
			0.5,
		),
	};
}

function latenessOf(late: readonly number[]): Lateness {
	return { median: quantile(late, 0.5), high: quantile(late, 0.99), latest: quantile(late, 1) };
}

/** Milliseconds by which `attacked` is later than the steps at rest, the first of `others`, or its latest than any of theirs. */
function laterBy(attacked: Measured, others: readonly Measured[], of: "ends" | "news"): number {
	const [attack, rest] = [attacked[of], others[0]![of]];
	const latest = Math.max(...others.map((measured) => measured[of].latest));
	return Math.max(attack.median - rest.median, attack.high - rest.high, attack.latest - latest);
}

/** Its line, and whether nothing is wrong. */
function judge(kind: string | null, outcome: Outcome, undisturbed: Outcome): boolean {
	const { attack } = outcome;
	const { attacked, resting } = compare(outcome);
	const control = kind === null ? [] : Object.values(compare(undisturbed));
	const later =
		Math.max(...(["ends", "news"] as const).map((of) => laterBy(attacked, [resting, ...control], of))) / period;
	const more = outcome.resident - undisturbed.resident;
	const equal = outcome.results.every((result, rank) => result !== "" && result === undisturbed.results[rank]);
	const wrong = [
		...(flags.timing && kind !== null && !(later <= limits.lateness) ? ["late"] : []),
		...(more > limits.bytes ? ["memory"] : []),
		...(outcome.descriptors > limits.descriptors ? ["descriptors"] : []),
		...(equal ? [] : ["result"]),
		...(kind !== null && attack.connections === 0 ? ["no connection"] : []),
		...(outcome.errors === "" ? [] : ["errors"]),
	];
	const shown = ({ median, high, latest }: Lateness) => `${median} ${high} ${latest}`;
	const both = (of: (measured: Measured) => string) => `${of(attacked)} / ${of(resting)}`;
	const columns = [
		(kind ?? "nobody").padEnd(10),
		both(({ steps }) => String(steps)).padEnd(10),
		both(({ ends }) => shown(ends)).padEnd(22),
		both(({ news }) => shown(news)).padEnd(26),
		`${(100 * later).toFixed(1)} %`.padEnd(8),
		both(({ processor }) => processor.toFixed(1)).padEnd(14),
		`${(more / 2 ** 20).toFixed(1)} MiB`.padEnd(12),
		String(outcome.descriptors).padEnd(12),
		(equal ? "equal" : "DIFFERENT").padEnd(10),
		kind === null ? "" : `${attack.connections} connections, ${(attack.sent / 2 ** 20).toFixed(1)} MiB`,
	];
	console.log(`${columns.join(" ")}${wrong.length === 0 ? "" : `  FAILED: ${wrong.join(", ")}`}`);
	if (outcome.errors !== "") console.log(outcome.errors.trim());
	return wrong.length === 0;
}

const scheduled = played.prefix.length > 0 ? "in real time" : "that compete with what else runs here";
console.log(`${played.steps} steps of ${period} ms on 4 ranks ${scheduled}; attacked / at rest, in milliseconds`);
console.log(
	"attacker   steps      ends: median p99 latest news: median p99 latest    later    rank 0's work  more memory  descriptors  result     what it did",
);
const started = wanted.map((kind) => (flags.timing ? () => play(kind, played) : once(play(kind, played))));
const undisturbed = await play(null, played);
if (undisturbed.results.some((result) => !result.startsWith('{"losses"'))) {
	console.error(`attackers: the undisturbed run failed:\n${undisturbed.errors}`);
	// Processes of the others end with them.
	if (!flags.timing) await Promise.all(started.map((result) => result()));
	process.exit(1);
}
let failed = !judge(null, undisturbed, undisturbed);
for (const [index, kind] of wanted.entries()) {
	failed = !judge(kind, await started[index]!(), undisturbed) || failed;
}
process.exit(failed ? 1 : 0);

function once<T>(value: Promise<T>): () => Promise<T> {
	return () => value;
}
