/**
 * Each rank sends rank 0 a report and then answers its questions, before any run exists: without native library or shared memory
 * (`mimo doctor` under srun). Rank 0 also compares the ranks' clocks with its own.
 */
import { UserError } from "../system/errors.ts";
import type { Place } from "./place.ts";
import { AuthenticatedConnection, AuthenticatedListener } from "./rendezvous/authenticated-connection.ts";
import { isLoopback, LineConnection, rendezvousAddress } from "./rendezvous/line-connection.ts";

export interface RankReport<Report> {
	readonly rank: number;
	readonly report: Report;
	/** Milliseconds that the rank's clock is ahead of rank 0's, and the error of that: half the round trip. */
	readonly skew: number;
	readonly uncertainty: number;
}

/** A rank that has sent its report and waits for questions. */
export interface ReportingRank<Report> extends RankReport<Report> {
	/** Addresses at which rank 0, and so other ranks, can reach it. */
	readonly addresses: readonly string[];
	/** Asks the rank a question. Throws a UserError if it does not answer. */
	ask(question: unknown): Promise<unknown>;
}

export interface GatheringOptions {
	/** Milliseconds for all reports to arrive. */
	readonly milliseconds: number;
	/** Answers a question of rank 0. */
	readonly answer: (question: unknown) => Promise<unknown>;
}

/** Milliseconds between attempts to connect, and to wait for a short answer, for an answer that needs work, for the next question. */
const timeouts = { retry: 200, answer: 20_000, work: 900_000, nextQuestion: 600_000 };
/** Number of clock questions; the quickest answer is used. */
const questions = 5;

interface Hello<Report> {
	readonly rank: number;
	readonly report: Report;
}

/**
 * On rank 0 calls `use` with the reports of all ranks, rank 0 first, and returns its result; other ranks answer questions until
 * rank 0 has finished, and return null.
 * Throws a UserError that names absent ranks.
 */
export async function gather<Report, Result>(
	place: Place,
	report: Report,
	options: GatheringOptions,
	use: (reports: readonly ReportingRank<Report>[]) => Promise<Result>,
): Promise<Result | null> {
	if (place.rank !== 0) {
		await sendReport(place, report, options);
		return null;
	}
	const connections: AuthenticatedConnection[] = [];
	try {
		return await use(await receiveReports(place, report, options, connections));
	} finally {
		for (const connection of connections) {
			connection.send({ done: true });
			connection[Symbol.dispose]();
		}
	}
}

/** Addresses of this host at which others may reach it. */
function ownAddresses(place: Place): string[] {
	return [place.address, ...(place.fallbackAddress ? [place.fallbackAddress] : [])];
}

async function receiveReports<Report>(
	place: Place,
	report: Report,
	{ milliseconds, answer }: GatheringOptions,
	connections: AuthenticatedConnection[],
): Promise<ReportingRank<Report>[]> {
	const self: ReportingRank<Report> = {
		rank: 0,
		report,
		skew: 0,
		uncertainty: 0,
		addresses: ownAddresses(place),
		ask: answer,
	};
	const reports = new Map<number, ReportingRank<Report>>([[0, self]]);
	const listener = await AuthenticatedListener.open({
		endpoint: { host: await rendezvousAddress(place, milliseconds), port: place.port },
		secret: place.secret,
		expected: place.worldSize,
		admit: (connection) => {
			connections.push(connection);
			void receiveReport<Report>(connection, place).then((reporting) => {
				if (reporting) reports.set(reporting.rank, reporting);
			});
		},
	});
	const end = performance.now() + milliseconds;
	while (reports.size < place.worldSize && performance.now() < end) await Bun.sleep(20);
	listener[Symbol.dispose]();
	if (reports.size < place.worldSize) {
		const absent = Array.from({ length: place.worldSize }, (_, rank) => rank).filter((rank) => !reports.has(rank));
		throw new UserError(`Ranks ${absent.join(", ")} did not answer rank 0 within ${milliseconds / 1000} s.`);
	}
	return [...reports.values()].sort((a, b) => a.rank - b.rank);
}

async function receiveReport<Report>(
	connection: AuthenticatedConnection,
	place: Place,
): Promise<ReportingRank<Report> | null> {
	const hello = (await connection.receive(timeouts.answer)) as Hello<Report> | undefined;
	if (hello === undefined) return null;
	const { rank, report } = hello;
	let best = { skew: 0, uncertainty: Number.POSITIVE_INFINITY };
	for (let i = 0; i < questions; i++) {
		const asked = Date.now() + (performance.now() % 1);
		const began = performance.now();
		connection.send({ time: true });
		const time = await connection.receive(timeouts.answer);
		const there = (performance.now() - began) / 2;
		if (typeof time !== "number") return null;
		if (there < best.uncertainty) best = { skew: time - (asked + there), uncertainty: there };
	}
	const ask = async (question: unknown) => {
		connection.send({ question });
		const answered = (await connection.receive(timeouts.work)) as { readonly answer: unknown } | undefined;
		if (answered === undefined) throw new UserError(`Rank ${rank} has closed its connection.`);
		return answered.answer;
	};
	// A rank on this host may have connected to an address that other hosts cannot reach.
	const addresses = isLoopback(connection.from) ? [connection.from, ...ownAddresses(place)] : [connection.from];
	return { rank, report, ...best, addresses, ask };
}

/** A message of rank 0: a clock question, a question, or the end. */
type Request = { readonly time?: true; readonly done?: true; readonly question?: unknown } | undefined;

async function sendReport(place: Place, report: unknown, { milliseconds, answer }: GatheringOptions): Promise<void> {
	const end = performance.now() + milliseconds;
	// Without a secret rank 0 listens where no other host can reach it.
	const numeric = await rendezvousAddress(place, milliseconds);
	const addresses = place.secret === null ? [numeric] : ownAddresses(place);
	for (let attempt = 0; performance.now() < end; attempt++) {
		try {
			const address = addresses[attempt % addresses.length]!;
			using line = await LineConnection.open({ host: address, port: place.port }, timeouts.retry * 5);
			const connection = await AuthenticatedConnection.connect(line, place.secret);
			if (!(connection instanceof AuthenticatedConnection)) throw new Error(connection.kind);
			connection.send({ rank: place.rank, report });
			const next = async () => (await connection.receive(timeouts.nextQuestion)) as Request;
			for (let request = await next(); request !== undefined && !request.done; request = await next()) {
				if (request.time) connection.send(Date.now());
				else connection.send({ answer: await answer(request.question) });
			}
			return;
		} catch {
			await Bun.sleep(timeouts.retry);
		}
	}
	throw new UserError(`Rank 0 did not answer at ${addresses.join(" or ")}, port ${place.port}.`);
}
