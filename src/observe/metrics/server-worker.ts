/** The thread that answers scrapes: an entry point of its own, because a training loop is long away from its event loop. */
import { systemReason } from "../../system/system-errors.ts";
import { RunMetrics } from "./exposition.ts";
import type { ServerAnswer, ServerMessage } from "./server.ts";

declare const self: Worker;

/** Milliseconds in which the port of a run that has just ended becomes free. */
const handover = 5000;

let metrics: RunMetrics;
const now = () => Date.now() / 1000;

async function listen(address: string, port: number): Promise<number> {
	for (const began = performance.now(); ; ) {
		try {
			const server = Bun.serve({
				hostname: address,
				port,
				fetch: ({ url, method }) =>
					new URL(url).pathname !== "/metrics"
						? new Response("Metrics are at /metrics.\n", { status: 404 })
						: new Response(method === "HEAD" ? null : metrics.text(now()), {
								headers: { "content-type": "text/plain; version=0.0.4; charset=utf-8" },
							}),
			});
			return server.port!;
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "EADDRINUSE" || performance.now() - began > handover) throw error;
			await Bun.sleep(100);
		}
	}
}

self.onmessage = async ({ data }: MessageEvent<ServerMessage>) => {
	if (data.kind !== "listen") {
		metrics.take(data, now());
		return;
	}
	metrics = new RunMetrics(data.facts, now());
	let answer: ServerAnswer;
	try {
		answer = { port: await listen(data.address, data.port), failure: null };
	} catch (error) {
		const taken = (error as NodeJS.ErrnoException).code === "EADDRINUSE";
		answer = { port: 0, failure: taken ? "another program has the port" : systemReason(error) };
	}
	self.postMessage(answer);
};
