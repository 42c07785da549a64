/** `mimo parity` on processes: references with images of any size. */
import { agreesOnProcesses } from "./agreement.ts";

agreesOnProcesses("mimo-1x1-dynamic", {
	quick: ["dp2|pp2"],
	more: ["1", "1+1", "tp2+1", "tp2+tp2ep2", "1+pp2", "tp2+pp2", "dp4|tp2dp2ep2"],
});
agreesOnProcesses("mimo-tp2-tp2ep2-dynamic", {
	quick: ["1+tp2dp2ep2etp2", "tp2+pp2"],
	more: ["1", "1+1", "tp2+tp2ep2", "tp4+tp2ep2", "1+pp2", "dp2|pp2", "dp4|tp2dp2ep2"],
});
