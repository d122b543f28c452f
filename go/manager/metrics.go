package manager

import (
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/logging"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// scrapeTimeout is how long one answer to Prometheus may take.
const scrapeTimeout = 10 * time.Second

// The phases of a step, as measured by the manager server.
const (
	gatherPhase = "gather" // from the first rank's request for a quorum to the last one's
	quorumPhase = "quorum" // from the request to the lighthouse to its answer
	stepPhase   = "step"   // from the quorum to the first vote: computation and collectives
	votePhase   = "vote"   // from the first rank's vote to the last one's
)

// meters are the metrics of the group. The server's lock guards the times; the metrics are safe for
// concurrent use.
type meters struct {
	registry *prometheus.Registry

	commits, lost, heals, healed, lostInRecovery prometheus.Counter

	counts map[string]prometheus.Counter // one for each of Counters, by the names that ranks send

	step     prometheus.Histogram // from one commit to the next
	phases   map[string]prometheus.Observer
	recovery *prometheus.CounterVec
	at       prometheus.Gauge

	began     string    // the current phase; empty if there is none
	since     time.Time // when it began
	committed time.Time // time of the last commit, zero before the first
}

func newMeters(job, replicaID string) *meters {
	// The part of the name before the UUID: it stays the same after a restart, so the time series continue.
	group, _, _ := strings.Cut(replicaID, ":")
	m := &meters{
		registry: prometheus.NewRegistry(), counts: map[string]prometheus.Counter{},
		phases: map[string]prometheus.Observer{},
	}
	m.registry.MustRegister(logging.Metric(), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics := promauto.With(prometheus.WrapRegistererWith(
		prometheus.Labels{"training_job": job, "group": group}, m.registry))
	counter := func(name, help string) prometheus.Counter {
		return metrics.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m.commits = counter("torchft_manager_commits_total", "Steps that the group committed.")
	m.lost = counter("torchft_manager_lost_steps_total", "Steps that the group voted on and did not commit.")
	m.heals = counter("torchft_manager_heals_total", "Heals of a rank: it took over the state of a peer.")
	m.healed = counter("torchft_manager_healed_bytes_total", "Bytes of the states that ranks took over.")
	m.lostInRecovery = counter("torchft_manager_recovery_lost_steps_total",
		"Steps that ranks lost to failures of peers before they committed again.")
	for name, c := range Counters {
		m.counts[name] = counter(c.Metric, c.Help)
	}
	buckets := prometheus.ExponentialBuckets(0.001, 4, 10) // 1 ms to 4.4 minutes
	m.step = metrics.NewHistogram(prometheus.HistogramOpts{Name: "torchft_manager_step_seconds",
		Help: "Time from one commit of the group to the next.", Buckets: buckets})
	phases := metrics.NewHistogramVec(prometheus.HistogramOpts{Name: "torchft_manager_phase_seconds",
		Help: "Time of each phase of a step, as the group's manager server sees them.", Buckets: buckets,
	}, []string{"phase"})
	for _, phase := range []string{gatherPhase, quorumPhase, stepPhase, votePhase} {
		m.phases[phase] = phases.WithLabelValues(phase)
	}
	m.recovery = metrics.NewCounterVec(prometheus.CounterOpts{Name: "torchft_manager_recovery_seconds_total",
		Help: "Time that ranks spent in each phase of their recoveries, summed over all ranks.",
	}, []string{"recovery", "phase"})
	m.at = metrics.NewGauge(prometheus.GaugeOpts{Name: "torchft_manager_step",
		Help: "Step that the group voted on last."})
	return m
}

// observe is called with every event of the machine and its actions.
func (m *meters) observe(event round.Event, actions []round.Action, now time.Time) {
	switch event.(type) {
	case round.QuorumAsked:
		if m.began == stepPhase || m.began == votePhase {
			m.failed() // the previous step ended without a vote
		}
		if m.began == "" {
			m.begins(gatherPhase, now)
		}
	case round.Voted:
		m.begins(votePhase, now)
	}
	for _, action := range actions {
		switch a := action.(type) {
		case round.AskLighthouse:
			m.begins(quorumPhase, now)
		case round.AnswerQuorum:
			m.begins(stepPhase, now)
		case round.AnswerVote: // one for each rank
			if vote, ok := event.(round.Voted); ok && m.began == votePhase {
				m.voted(vote.Step, a.ShouldCommit, now)
				if a.Stands { // the ranks begin the next step, and do not ask
					m.begins(stepPhase, now)
				}
			}
		case round.Fail:
			m.failed()
		}
	}
}

// begins ends the current phase, and begins another one, or none if its name is empty.
func (m *meters) begins(phase string, now time.Time) {
	if m.began == phase {
		return
	}
	if observer := m.phases[m.began]; observer != nil {
		observer.Observe(now.Sub(m.since).Seconds())
	}
	m.began, m.since = phase, now
}

// failed ends the current phase without a measurement, since it was not completed.
func (m *meters) failed() { m.began = "" }

// voted counts a step on which all ranks voted.
func (m *meters) voted(step int64, committed bool, now time.Time) {
	m.begins("", now)
	m.at.Set(float64(step))
	if !committed {
		m.lost.Inc()
		return
	}
	m.commits.Inc()
	if !m.committed.IsZero() {
		m.step.Observe(now.Sub(m.committed).Seconds())
	}
	m.committed = now
}

// recovered counts the duration of a rank's recovery. Unknown phases are counted as "other": a client must
// not create labels without bound.
func (m *meters) recovered(r *torchftpb.Recovered) {
	kind := "failure"
	if r.GetHealed() {
		kind = "heal"
		m.heals.Inc()
		m.healed.Add(float64(max(0, r.GetBytes())))
	}
	m.lostInRecovery.Add(float64(max(0, r.GetStepsLost())))
	for _, p := range r.GetPhases() {
		phase := "other"
		if knownPhases[p.GetPhase()] {
			phase = p.GetPhase()
		}
		if p.GetSeconds() > 0 {
			m.recovery.WithLabelValues(kind, phase).Add(p.GetSeconds())
		}
	}
}

// knownPhases are the phases of torchft/_manager/observe/phases.py.
var knownPhases = map[string]bool{
	"quorum": true, "reconfigure": true, "transfer": true, "load": true, "abort": true, "vote": true,
	"next step": true,
}

// handler serves the metrics to authorized clients.
func (s *Server) handler(gate *rpc.Gate) http.Handler {
	mux := http.NewServeMux()
	metrics := promhttp.HandlerFor(s.meters.registry,
		promhttp.HandlerOpts{MaxRequestsInFlight: 2, Timeout: scrapeTimeout})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		switch check := gate.CheckToken(r.Header.Values("Authorization")); check {
		case auth.TokenMissing, auth.TokenWrong:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the metrics are not shown: "+check.String(), http.StatusUnauthorized)
		default:
			metrics.ServeHTTP(w, r)
		}
	})
	return mux
}
