/**
 * How the ranks of a run find each other, over TCP. The host (our launcher, or rank 0) and a rank prove to each other
 * that they know the run's secret; then the rank says what it is, and the host compares it with itself. When all ranks
 * are there the host tells them where the shared memory of the run is. On every other machine the first rank is asked to make
 * that first. One JSON value a line:
 *
 *     host → rank   {"program": "mimo", "protocol": 2, "challenge": HEX}
 *     rank → host   {"challenge": HEX, "body": IDENTITY, "proof": HMAC of both challenges and the body}
 *     host → rank   {"body": LEAD, "proof": HMAC}           to the first rank of another machine
 *     rank → host   {"body": LED or FAILED, "proof": HMAC}  by that
 *     host → rank   {"body": WELCOME or REFUSAL, "proof": HMAC}
 *
 * Strangers are turned away and harm nobody; a rank of the run that does not fit ends it for all.
 */
import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import type { Server } from "node:net";
import * as v from "valibot";
import { UserError } from "../native/errors.ts";
import { describeIdentity, type Identity, identitySchema, objection } from "./identity.ts";
import { LineConnection, listen } from "./line-connection.ts";
import type { Place } from "./place.ts";

const program = "mimo";
const protocol = 2;
/** Milliseconds in which each side has to answer. */
const answerTime = 10_000;
const retryInterval = 100;

const greetingSchema = v.object({
	program: v.literal(program),
	protocol: v.number(),
	challenge: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
const signedSchema = v.strictObject({ body: v.string(), proof: v.string(), challenge: v.optional(v.string()) });
const leadSchema = v.strictObject({
	/** On which of the run's machines each rank is. */
	hostOfRank: v.array(v.pipe(v.number(), v.integer(), v.minValue(0))),
	/** The machine whose shared memory is wanted. */
	host: v.pipe(v.number(), v.integer(), v.minValue(1)),
	/** Where rank 0's process passes on between machines, and what the key to it is derived from. */
	port: v.pipe(v.number(), v.integer(), v.minValue(1), v.maxValue(65535)),
	nonce: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
const answerSchema = v.union([
	v.strictObject({ run: v.string() }),
	v.strictObject({ lead: leadSchema }),
	v.strictObject({ refused: v.string(), reason: v.picklist(["run", "secret"]) }),
]);
type Answer = v.InferOutput<typeof answerSchema>;
/** What the first rank of another machine is asked for. */
export type Lead = v.InferOutput<typeof leadSchema>;
const ledSchema = v.union([v.strictObject({ run: v.string() }), v.strictObject({ failed: v.string() })]);
type Led = v.InferOutput<typeof ledSchema>;

/** What both sides of a connection sign. */
class Session {
	constructor(
		private readonly secret: string,
		private readonly hostChallenge: string,
		private readonly rankChallenge: string,
	) {}

	proof(side: "host" | "rank", body: string): string {
		const text = [program, protocol, side, this.hostChallenge, this.rankChallenge, body].join("\n");
		return createHmac("sha256", this.secret).update(text).digest("hex");
	}

	verifies(side: "host" | "rank", body: string, proof: string): boolean {
		const [expected, actual] = [Buffer.from(this.proof(side, body)), Buffer.from(proof)];
		return expected.length === actual.length && timingSafeEqual(expected, actual);
	}
}

function challenge(): string {
	return randomBytes(32).toString("hex");
}

interface Member {
	readonly identity: Identity;
	readonly connection: LineConnection;
	readonly session: Session;
}

export class RendezvousHost implements Disposable {
	readonly #members = new Map<number, Member>();
	#strangers: string | null = null;
	#failure: string | null = null;
	#left: number | null = null;
	#changed: (() => void) | null = null;
	#server: Server | null = null;
	#port = 0;

	private constructor(
		private readonly secret: string,
		/** What ranks are compared with. */
		private readonly reference: Identity,
	) {}

	/** Throws a UserError that names a port in use. */
	static async open(address: string, port: number, secret: string, reference: Identity): Promise<RendezvousHost> {
		const host = new RendezvousHost(secret, reference);
		try {
			const opened = await listen(address, port, (connection) => void host.#admit(connection));
			host.#server = opened.server;
			host.#port = opened.port;
		} catch (error) {
			throw new UserError(cannotListen(address, port, (error as NodeJS.ErrnoException).code));
		}
		return host;
	}

	/** The rank that gather() failed for because it left; null where none did. */
	get left(): number | null {
		return this.#left;
	}

	get port(): number {
		return this.#port;
	}

	/** Resolves when `ranks` have met here. Throws a UserError about the one that does not fit, or those absent. */
	async gather(ranks: readonly number[], milliseconds: number): Promise<void> {
		const end = performance.now() + milliseconds;
		while (true) {
			if (this.#failure !== null) this.#giveUp(this.#failure);
			const absent = ranks.filter((rank) => !this.#members.has(rank));
			if (absent.length === 0) return;
			const left = end - performance.now();
			if (left <= 0) {
				const who = `${absent.length === 1 ? "Rank" : "Ranks"} ${absent.join(", ")} did not join within ${Math.round(milliseconds / 1000)} s.`;
				this.#giveUp(this.#strangers === null ? who : `${who} ${this.#strangers}`);
			}
			await new Promise<void>((resolve) => {
				const timer = setTimeout(resolve, left);
				this.#changed = () => {
					clearTimeout(timer);
					resolve();
				};
			});
		}
	}

	/** What those that have met here are, by rank; this process itself is none of them. */
	get members(): ReadonlyMap<number, Identity> {
		return new Map([...this.#members].map(([rank, { identity }]) => [rank, identity]));
	}

	/** Asks a rank to make the shared memory of its machine; resolves with where it is. Throws a UserError. */
	async ask(rank: number, lead: Lead): Promise<string> {
		const { identity, connection, session } = this.#members.get(rank)!;
		send(connection, session, { lead });
		const signed = v.safeParse(signedSchema, await connection.receive(answerTime));
		const genuine = signed.success && session.verifies("rank", signed.output.body, signed.output.proof);
		const led = v.safeParse(ledSchema, genuine ? parse(signed.output.body) : undefined);
		if (led.success && "run" in led.output) return led.output.run;
		const why = led.success && "failed" in led.output ? led.output.failed : "It gave no answer.";
		throw new UserError(`${describeIdentity(identity)} could not make its host's part of the run: ${why}`);
	}

	/** Tells every rank where the shared memory of the run is, on its machine. */
	welcome(run: string | ((rank: number) => string)): void {
		for (const [rank, { connection, session }] of this.#members)
			send(connection, session, { run: typeof run === "string" ? run : run(rank) });
	}

	/** Tells every rank why there will be no run. */
	refuse(reason: string): void {
		this.#tell({ refused: reason, reason: "run" });
	}

	/** A gather() under way fails. */
	[Symbol.dispose](): void {
		this.#fail("The rendezvous was closed.");
		for (const { connection } of this.#members.values()) connection[Symbol.dispose]();
		this.#server?.close();
		this.#server?.unref();
	}

	#giveUp(reason: string): never {
		this.refuse(reason);
		throw new UserError(reason);
	}

	#tell(answer: Answer): void {
		for (const { connection, session } of this.#members.values()) send(connection, session, answer);
	}

	async #admit(connection: LineConnection): Promise<void> {
		const hostChallenge = challenge();
		connection.send({ program, protocol, challenge: hostChallenge });
		const hello = v.safeParse(signedSchema, await connection.receive(answerTime));
		if (!hello.success || hello.output.challenge === undefined)
			return this.#turnAway(connection, "spoke no rendezvous");
		const { body, proof } = hello.output;
		const session = new Session(this.secret, hostChallenge, hello.output.challenge);
		if (!session.verifies("rank", body, proof)) {
			const refused = "This process has not the secret of the run (MIMO_SECRET) that meets here.";
			send(connection, session, { refused, reason: "secret" });
			return this.#turnAway(connection, "had another secret");
		}
		const identity = v.safeParse(identitySchema, parse(body));
		if (!identity.success) this.#fail(`A rank of another version wants to join from ${connection.from}.`);
		else this.#join({ identity: identity.output, connection, session });
	}

	#turnAway(connection: LineConnection, why: string): void {
		connection[Symbol.dispose]();
		this.#strangers = `Somebody from ${connection.from} ${why} and was refused.`;
	}

	#join(member: Member): void {
		const { rank } = member.identity;
		const known = this.#members.get(rank ?? -1);
		const wrong =
			objection(member.identity, this.reference) ??
			(rank === null || rank >= this.reference.worldSize || rank === this.reference.rank
				? `${describeIdentity(member.identity)} is not expected by ${describeIdentity(this.reference)}.`
				: known === undefined
					? null
					: `${describeIdentity(member.identity)} and ${describeIdentity(known.identity)} are the same rank.`);
		if (wrong !== null) {
			send(member.connection, member.session, { refused: wrong, reason: "run" });
			this.#fail(wrong);
			return;
		}
		this.#members.set(rank!, member);
		this.#changed?.();
		void member.connection.ended().then(() => {
			if (this.#failure === null) this.#left = rank!;
			this.#fail(`${describeIdentity(member.identity)} left before all had joined.`);
		});
	}

	#fail(reason: string): void {
		this.#failure ??= reason;
		this.#changed?.();
	}
}

function parse(text: string): unknown {
	try {
		return JSON.parse(text);
	} catch {
		return undefined;
	}
}

function send(connection: LineConnection, session: Session, answer: Answer): void {
	const body = JSON.stringify(answer);
	connection.send({ body, proof: session.proof("host", body) });
}

function reply(connection: LineConnection, session: Session, led: Led): void {
	const body = JSON.stringify(led);
	connection.send({ body, proof: session.proof("rank", body) });
}

function cannotListen(address: string, port: number, code: string | undefined): string {
	switch (code) {
		case "EADDRINUSE":
			return `Port ${port} of ${address}, where the ranks should meet, is in use by another program; give another MASTER_PORT.`;
		case "EADDRNOTAVAIL":
		case "ENOTFOUND":
			return `MASTER_ADDR ${address} is no address of this host, where rank 0 runs.`;
		case "EACCES":
			return `Port ${port} of ${address}, where the ranks should meet, may not be used; give another MASTER_PORT.`;
		default:
			return `The ranks cannot meet at ${address}:${port} (${code}).`;
	}
}

/**
 * Meets the host; resolves with the path of the run's shared memory when all ranks are there. Asked to, it makes that with
 * `lead`, which is told the host's numeric address and returns the path. Throws UserErrors.
 */
export async function meet(
	place: Place,
	identity: Identity,
	milliseconds: number,
	lead: (wanted: Lead, address: string) => string,
): Promise<string> {
	const where = `${place.address}:${place.port}`;
	const end = performance.now() + milliseconds;
	using connection = await reach(place, end);
	const first = await connection.receive(answerTime);
	const greeting = v.safeParse(greetingSchema, first);
	if (!greeting.success) {
		throw new UserError(`What listens at ${where} is no rendezvous of mimo; give another MASTER_PORT.`);
	}
	if (greeting.output.protocol !== protocol) {
		throw new UserError(
			`The rendezvous at ${where} is of another version (${greeting.output.protocol}, here ${protocol}).`,
		);
	}
	const own = challenge();
	const session = new Session(place.secret, greeting.output.challenge, own);
	const body = JSON.stringify(identity);
	connection.send({ challenge: own, body, proof: session.proof("rank", body) });
	while (true) {
		const signed = v.safeParse(signedSchema, await connection.receive(end - performance.now()));
		const answer = v.safeParse(answerSchema, signed.success ? parse(signed.output.body) : undefined);
		if (!signed.success || !answer.success) {
			throw new UserError(
				connection.closed
					? `The rendezvous at ${where} ended before all ranks had joined.`
					: `Not all ranks met at ${where} within ${Math.round(milliseconds / 1000)} s.`,
			);
		}
		const genuine = session.verifies("host", signed.output.body, signed.output.proof);
		if ("refused" in answer.output && (genuine || answer.output.reason === "secret")) {
			throw new UserError(answer.output.refused);
		}
		if (!genuine || "refused" in answer.output) {
			throw new UserError(`The rendezvous at ${where} has not the secret of this run (MIMO_SECRET).`);
		}
		if ("run" in answer.output) return answer.output.run;
		try {
			reply(connection, session, { run: lead(answer.output.lead, connection.address) });
		} catch (error) {
			reply(connection, session, { failed: (error as Error).message });
			throw error;
		}
	}
}

/** Tries until the host is there. */
async function reach(place: Place, end: number): Promise<LineConnection> {
	while (true) {
		try {
			return await LineConnection.open(place.address, place.port, Math.min(answerTime, end - performance.now()));
		} catch (error) {
			const code = (error as NodeJS.ErrnoException).code;
			if (performance.now() + retryInterval < end && code !== "ENOTFOUND") {
				await Bun.sleep(retryInterval);
				continue;
			}
			throw new UserError(`Nobody answers at ${place.address}:${place.port}, where the ranks should meet (${code}).`);
		}
	}
}
