package dashboard

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/torchft/torchft/go/internal/logging"
	"github.com/torchft/torchft/go/quorum"
)

// scrapeTimeout is how long one answer to Prometheus may take.
const scrapeTimeout = 10 * time.Second

// Metrics serves the metrics of all jobs, and of this process, to Prometheus.
func Metrics(feeds func() []*Feed) http.Handler {
	return promhttp.HandlerFor(registry(feeds),
		promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: scrapeTimeout})
}

func registry(feeds func() []*Feed) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector(feeds), logging.Metric(), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// collector is a prometheus.Collector for the present jobs.
type collector func() []*Feed

// Describe sends nothing, which makes the collector unchecked: its metrics depend on the jobs.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect collects the metrics of each job.
func (c collector) Collect(out chan<- prometheus.Metric) {
	for _, f := range c() {
		f.collect(out)
	}
}

// meters has the metrics of a job that are counted event by event.
type meters struct {
	registry *prometheus.Registry

	rounds, heartbeats, heals, healed, lost prometheus.Counter

	events   map[Kind]prometheus.Counter // of these kinds: the members that they name, else the events
	failures *prometheus.CounterVec      // by cause
	recovery *prometheus.HistogramVec    // of heals and failures
	quorum   prometheus.Histogram
	step     prometheus.Histogram
}

// mostSteps bounds the steps observed at once: after an absence of the lighthouse there may be millions.
const mostSteps = 1000

func newMeters(job string) *meters {
	m := &meters{registry: prometheus.NewRegistry()}
	labels := prometheus.Labels{"training_job": job}
	metrics := promauto.With(prometheus.WrapRegistererWith(labels, m.registry))
	counter := func(name, help string) prometheus.Counter {
		return metrics.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	times := func(name, help string) prometheus.HistogramOpts {
		buckets := prometheus.ExponentialBuckets(0.005, 2, 16) // 5 ms to 2.7 minutes
		return prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}
	}
	m.rounds = counter("torchft_quorum_rounds_total",
		"Quorums answered. While a quorum stands, its members train on without another one.")
	m.heartbeats = counter("torchft_heartbeats_total",
		"Heartbeats, which members send when they send nothing else.")
	m.events = map[Kind]prometheus.Counter{
		QuorumChanged: counter("torchft_quorum_changes_total",
			"Quorums with other members than the one before."),
		Killed:  counter("torchft_kills_total", "Members that were ended on request."),
		Drained: counter("torchft_drains_total", "Members that were asked to leave at the end of a step."),
		MemberStalled: counter("torchft_member_stalls_total",
			"Members that made no progress while others waited for them."),
		Stopped: counter("torchft_job_stops_total",
			"Exceptions that would have ended the job again and again, so that it was stopped."),
		Skipped: counter("torchft_skipped_units_total",
			"Units of batches that all groups leave out, since each of them would end with it."),
		Scaled: counter("torchft_scalings_total",
			"Decisions of scalers about the number of groups, and failures to carry one out."),
		BadNode: counter("torchft_bad_nodes_total",
			"Checks that found a host slow or broken before its groups start."),
		Corrupted: counter("torchft_corrupted_gradients_total",
			"Audits in which groups computed different gradients of the same unit."),
		Regressed: counter("torchft_regressions_total",
			"Quorums below the step that the job had reached: later steps are lost."),
	}
	m.heals = counter("torchft_heals_total", "Groups that took over the state of another.")
	m.healed = counter("torchft_healed_bytes_total",
		"Bytes of these states, of the first rank of each group.")
	m.lost = counter("torchft_lost_steps_total", "Steps that the survivors of failures lost.")
	m.failures = metrics.NewCounterVec(prometheus.CounterOpts{
		Name: "torchft_member_failures_total", Help: "Members that were found failed, by cause.",
	}, []string{"cause"})
	m.recovery = metrics.NewHistogramVec(times("torchft_recovery_seconds",
		"Time of a heal, or from a failure to the next commit of the survivors."), []string{"recovery"})
	m.quorum = metrics.NewHistogram(times("torchft_quorum_seconds",
		"Time from the first group that asks for a quorum to its answer, without stops of the lighthouse."))
	m.step = metrics.NewHistogram(times("torchft_step_seconds", "Time from one step of the job to the next."))
	for _, kind := range []string{"heal", "failure"} { // shown before the first
		m.recovery.WithLabelValues(kind)
	}
	for _, cause := range quorum.Causes {
		m.failures.WithLabelValues(string(cause))
	}
	return m
}

// round records a delivered quorum.
func (m *meters) round(waited time.Duration) {
	m.rounds.Inc()
	m.quorum.Observe(waited.Seconds())
}

// stepped records the steps that the job has made in a time.
func (m *meters) stepped(steps int64, took time.Duration) {
	for range min(steps, mostSteps) {
		m.step.Observe(took.Seconds() / float64(steps))
	}
}

func (m *meters) event(e Event) {
	switch e.Kind {
	case Killed, Drained, MemberStalled:
		m.events[e.Kind].Add(float64(len(e.Left)))
	case QuorumChanged, Stopped, Skipped, Scaled, BadNode, Corrupted, Regressed:
		m.events[e.Kind].Inc()
	case Healed:
		m.heals.Inc()
		m.healed.Add(float64(e.Bytes))
		m.recovery.WithLabelValues("heal").Observe(e.Took())
	case Recovered:
		m.lost.Add(float64(e.StepsLost))
		m.recovery.WithLabelValues("failure").Observe(e.Took())
	default: // failures are counted by cause (Feed.Failed), other events are not counted
	}
}

// gauge sends a gauge of a job, perhaps with a further label. The first label is not named job: Prometheus
// uses that name for the scraped target.
func (f *Feed) gauge(out chan<- prometheus.Metric, name, help string, value float64, label ...string) {
	names, values := []string{"training_job"}, []string{f.job}
	if len(label) > 0 {
		names, values = append(names, label[0]), append(values, label[1])
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), prometheus.GaugeValue,
		value, values...)
}

// collect computes the gauges of a job at each scrape, and sends them with its counters.
func (f *Feed) collect(out chan<- prometheus.Metric) {
	status := f.status()
	states := map[State]int{Training: 0, Healing: 0, Waiting: 0, Joining: 0, Suspect: 0, Stalled: 0,
		Draining: 0, Standby: 0, Failed: 0}
	oldest := int64(0)
	phases := map[string]int{}
	for _, p := range quorum.Phases() {
		phases[p.String()] = 0
	}
	slow := 0
	for _, m := range status.Members {
		if m.Straggler != "" {
			slow++
		}
		if m.Phase != "" {
			phases[m.Phase]++
		}
		states[stateOf(m.MemberStatus)]++
		if m.Healthy {
			oldest = max(oldest, m.HeartbeatAgeMS)
		}
	}
	gauge := func(name, help string, value float64) { f.gauge(out, name, help, value) }
	for state, n := range states {
		f.gauge(out, "torchft_members", "Members by state.", float64(n), "state", string(state))
	}
	for phase, n := range phases {
		f.gauge(out, "torchft_members_in_phase", "Live members by the phase that they report.", float64(n),
			"phase", phase)
	}
	for phase, ms := range status.EjectAfterMS {
		f.gauge(out, "torchft_eject_after_seconds", "How long a member may be in a phase while others wait "+
			"for it, before it is evicted.", float64(ms)/1000, "phase", phase)
	}
	gauge("torchft_quorum_id", "Id of the latest quorum.", float64(status.QuorumID))
	gauge("torchft_quorum_members", "Members of the latest quorum.", float64(len(status.Quorum)))
	gauge("torchft_step", "Largest step of the latest quorum.", float64(status.MaxStep))
	gauge("torchft_stragglers", "Members whose own work in a step takes longer than that of the others.",
		float64(slow))
	gauge("torchft_state_unkept_seconds", "For how long the latest state of the job is not on disk, since "+
		"that fails or hangs; 0: it is, or none is kept.", float64(status.UnkeptMS)/1000)
	gauge("torchft_oldest_sign_of_life_seconds",
		"Age of the oldest sign of life of a member that counts as alive.", float64(oldest)/1000)
	held := status.Snapshots
	gauge("torchft_keepers", "Hosts whose keeper has told what it holds of the job, within the last ten "+
		"seconds.", float64(held.Hosts))
	gauge("torchft_snapshot_bytes", "Bytes of the snapshots in the memory of all hosts.", float64(held.Bytes))
	gauge("torchft_snapshot_incomplete_slots",
		"Slots that hold nothing to restore: they are being written, or torn.", float64(held.Incomplete))
	if held.Step != nil {
		gauge("torchft_snapshot_step", "Newest step of which the keepers hold all ranks; none if there is "+
			"no such step.", float64(*held.Step))
	}
	if held.Checkpoint != nil {
		gauge("torchft_checkpoint_step", "Newest complete checkpoint on disk that the writer of a host "+
			"knows; none if there is none.", float64(*held.Checkpoint))
	}
	gauge("torchft_checkpoint_problem_seconds", "For how long the writer of a host has not got on, as on a "+
		"full disk; 0: all do.", float64(held.ProblemMS)/1000)
	f.mu.Lock()
	viewers := len(f.viewers)
	f.mu.Unlock()
	gauge("torchft_dashboard_viewers", "Browsers that look at the page.", float64(viewers))
	f.meters.registry.Collect(out)
}
