/** `mimo parity` on processes: references with images of one size. */
import { agreesOnProcesses } from "./agreement.ts";

agreesOnProcesses("mimo-1x1-fixed", {
	quick: ["1+pp2"],
	more: ["1", "1+1", "tp2+tp2ep2", "tp2+1", "tp2+pp2", "dp2|pp2", "dp4|tp2dp2ep2"],
});
agreesOnProcesses("mimo-dp2-dp2ep2-fixed", {
	quick: ["tp2dp2+tp2dp2ep2", "dp4|tp2dp2ep2"],
	more: ["1", "1+1", "tp4+tp2", "dp2+dp2ep2", "1+dp2ep2", "4+4", "1+pp2", "tp2+pp2", "dp2|pp2"],
});
