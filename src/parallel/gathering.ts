/**
 * Ranks that only tell rank 0 something and are told its answer, before any run: no native library, no shared memory. Rank 0
 * also compares the others' clocks with its own.
 */
import { UserError } from "../native/errors.ts";
import { type LineConnection, LineConnection as Lines, listen } from "./line-connection.ts";
import type { Place } from "./place.ts";

export interface Told<Report> {
	readonly rank: number;
	readonly report: Report;
	/** Milliseconds that the rank's clock is ahead of rank 0's, and how sure that is: half the way there and back. */
	readonly skew: number;
	readonly uncertainty: number;
}

const knock = { milliseconds: 200, answer: 20_000 };
/** Questions for the time of which the quickest counts. */
const questions = 5;

interface Hello<Report> {
	readonly secret: string;
	readonly rank: number;
	readonly report: Report;
}

/** On rank 0 everyone's report, its own first; on the others null. Throws a UserError about ranks that do not come. */
export async function gather<Report>(
	place: Place,
	report: Report,
	milliseconds: number,
): Promise<readonly Told<Report>[] | null> {
	if (place.rank === 0) return await hear(place, report, milliseconds);
	await tell(place, report, milliseconds);
	return null;
}

async function hear<Report>(place: Place, report: Report, milliseconds: number): Promise<Told<Report>[]> {
	const told = new Map<number, Told<Report>>([[0, { rank: 0, report, skew: 0, uncertainty: 0 }]]);
	const { server } = await listen("0.0.0.0", place.port, (connection) => {
		void listenTo<Report>(connection, place).then((one) => {
			if (one) told.set(one.rank, one);
		});
	});
	const end = performance.now() + milliseconds;
	while (told.size < place.worldSize && performance.now() < end) await Bun.sleep(20);
	server.close();
	server.unref();
	if (told.size < place.worldSize) {
		const absent = Array.from({ length: place.worldSize }, (_, rank) => rank).filter((rank) => !told.has(rank));
		throw new UserError(`Ranks ${absent.join(", ")} did not answer rank 0 within ${milliseconds / 1000} s.`);
	}
	return [...told.values()].sort((a, b) => a.rank - b.rank);
}

async function listenTo<Report>(lines: LineConnection, place: Place): Promise<Told<Report> | null> {
	using connection = lines;
	const hello = (await connection.receive(knock.answer)) as Hello<Report> | undefined;
	if (hello?.secret !== place.secret) return null;
	let best = { skew: 0, uncertainty: Number.POSITIVE_INFINITY };
	for (let i = 0; i < questions; i++) {
		const asked = Date.now() + (performance.now() % 1);
		const began = performance.now();
		connection.send("time");
		const theirs = await connection.receive(knock.answer);
		const there = (performance.now() - began) / 2;
		if (typeof theirs !== "number") return null;
		if (there < best.uncertainty) best = { skew: theirs - (asked + there), uncertainty: there };
	}
	connection.send("done");
	return { rank: hello.rank, report: hello.report, ...best };
}

async function tell(place: Place, report: unknown, milliseconds: number): Promise<void> {
	const end = performance.now() + milliseconds;
	const addresses = [place.address, ...(place.fallbackAddress ? [place.fallbackAddress] : [])];
	for (let attempt = 0; performance.now() < end; attempt++) {
		try {
			using connection = await Lines.open(addresses[attempt % addresses.length]!, place.port, knock.milliseconds * 5);
			connection.send({ secret: place.secret, rank: place.rank, report });
			for (let word = await connection.receive(knock.answer); word === "time"; ) {
				connection.send(Date.now());
				word = await connection.receive(knock.answer);
			}
			return;
		} catch {
			await Bun.sleep(knock.milliseconds);
		}
	}
	throw new UserError(`Rank 0 did not answer at ${addresses.join(" or ")}, port ${place.port}.`);
}
