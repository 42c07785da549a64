/**
 * Where processes that know the run's secret come in. Others may connect too: a bounded number of them is held, each with room
 * for a short line and for a bounded time.
 */
import type { Server } from "node:net";
import { type LineConnection, listen, type Spot } from "./line-connection.ts";
import { ProvenConnection } from "./proven-connection.ts";

export interface ReceptionOptions {
	readonly spot: Spot;
	/** null: processes of this user on this host come in. */
	readonly secret: string | null;
	/** How many processes of the run may come at once; strangers get a few more places. */
	readonly expected: number;
	readonly admit: (connection: ProvenConnection) => void;
	/** Called with a sentence about a stranger that was turned away. */
	readonly turnedAway?: (sentence: string) => void;
}

const placesForStrangers = 64;

export class Reception implements Disposable {
	/** Connections that have not proved themselves, the oldest first. */
	readonly #strangers = new Set<LineConnection>();
	#server: Server | null = null;
	#port = 0;

	private constructor(private readonly options: ReceptionOptions) {}

	/** Fails with the system's error code. */
	static async open(options: ReceptionOptions): Promise<Reception> {
		const reception = new Reception(options);
		const opened = await listen(options.spot, (connection) => void reception.#meet(connection));
		reception.#server = opened.server;
		reception.#port = opened.port;
		return reception;
	}

	get port(): number {
		return this.#port;
	}

	/** Admits no further connection. */
	[Symbol.dispose](): void {
		this.#server?.close();
		this.#server?.unref();
		this.#server = null;
		for (const stranger of this.#strangers) stranger.drop();
	}

	async #meet(connection: LineConnection): Promise<void> {
		if (this.#strangers.size >= placesForStrangers + this.options.expected) this.#dropOldest();
		this.#strangers.add(connection);
		// A stranger that was turned away keeps its place until it has gone.
		void connection.ended().then(() => this.#strangers.delete(connection));
		const outcome = await ProvenConnection.welcome(connection, this.options.secret);
		if (typeof outcome === "string") {
			connection[Symbol.dispose]();
			this.options.turnedAway?.(`Somebody from ${connection.from} ${outcome} and was refused.`);
			return;
		}
		this.#strangers.delete(connection);
		if (this.#server === null) outcome[Symbol.dispose]();
		else this.options.admit(outcome);
	}

	/** Drops the stranger that has had the most time to prove itself. */
	#dropOldest(): void {
		const [oldest] = this.#strangers;
		this.#strangers.delete(oldest!);
		oldest!.drop();
	}
}
