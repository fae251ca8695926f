// Starts what a page has: each part looks for its own elements, and does nothing without them.
import { startToken } from "./token.js";
import { startLive } from "./live.js";
import { startCopying } from "./page.js";
import { startCharts } from "./charts.js";
import { startRuns } from "./runs.js";
import { startComparison } from "./compare.js";
import { startDataPage } from "./data.js";
import { startSamples } from "./samples.js";

startToken();
startLive();
startCopying();
startCharts();
startRuns();
startComparison();
startDataPage();
startSamples();
