/** Exposes a run to Prometheus: an observer that hands what is reported to a thread, which answers scrapes. */
import { UserError } from "../../system/errors.ts";
import { openWorker } from "../../system/worker.ts";
import type { EvaluationReport, Observer, RunEvent, StepReport } from "../step-report.ts";
import type { MetricsEvent, RunFacts } from "./exposition.ts";

export type ServerMessage =
	| { readonly kind: "listen"; readonly address: string; readonly port: number; readonly facts: RunFacts }
	| MetricsEvent;

/** The port of the server, or why it could not be opened. */
export interface ServerAnswer {
	readonly port: number;
	readonly failure: string | null;
}

export class MetricsServer implements Observer {
	private constructor(
		private readonly thread: Worker,
		/** Where metrics are. */
		readonly url: string,
	) {}

	/** Port 0: any that is free. Throws a UserError where nothing can listen at the address. */
	static async open(address: string, port: number, facts: RunFacts): Promise<MetricsServer> {
		const thread = openWorker("observe/metrics/server-worker");
		thread.unref();
		const answer = new Promise<ServerAnswer>((resolve) => {
			thread.onmessage = ({ data }: MessageEvent<ServerAnswer>) => resolve(data);
		});
		thread.postMessage({ kind: "listen", address, port, facts } satisfies ServerMessage);
		const { port: own, failure } = await answer;
		if (failure === null) {
			const host = address.includes(":") ? `[${address}]` : address;
			return new MetricsServer(thread, `http://${host}:${own}/metrics`);
		}
		thread.terminate();
		throw new UserError(`--metrics-port ${port} cannot be opened on ${address} (metrics-address): ${failure}.`);
	}

	#post(event: MetricsEvent): void {
		this.thread.postMessage(event);
	}

	step(report: StepReport): void {
		const { memory } = report;
		const most = (kind: "allocated" | "reserved" | "peak") => Math.max(...memory!.map((rank) => rank[kind]));
		const { iteration, consumedSamples, tokens, seconds, learningRate, losses, gradNorm, skipped, modules } = report;
		this.#post({
			kind: "step",
			sample: {
				...{ iteration, consumedSamples, tokens, seconds, learningRate, losses, gradNorm, skipped },
				...(modules && { modules }),
				memory: memory?.length
					? { allocated: most("allocated"), reserved: most("reserved"), peak: most("peak") }
					: null,
			},
		});
	}

	evaluation({ split, losses }: EvaluationReport): void {
		this.#post({ kind: "evaluation", report: { split, losses } });
	}

	event({ kind, details }: RunEvent): void {
		if (kind === "save") this.#post({ kind });
		if (kind === "start") this.#post({ kind, restarts: Number(details?.restarts ?? 0) });
	}

	note(): void {}

	close(): void {
		this.thread.terminate();
	}
}
