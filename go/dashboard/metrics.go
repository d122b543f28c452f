package dashboard

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// scrapeTimeout is how long one answer to Prometheus may take.
const scrapeTimeout = 10 * time.Second

// Metrics serves Prometheus what is known of all jobs, and of this process.
func Metrics(feeds func() []*Feed) http.Handler {
	return promhttp.HandlerFor(registry(feeds), promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: scrapeTimeout})
}

func registry(feeds func() []*Feed) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector(feeds), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// collector is a prometheus.Collector over jobs that come and go.
type collector func() []*Feed

// Describe says nothing: what there is depends on the jobs.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect asks each job.
func (c collector) Collect(out chan<- prometheus.Metric) {
	for _, f := range c() {
		f.collect(out)
	}
}

// meters count what happens to a job, for Prometheus.
type meters struct {
	rounds   prometheus.Counter
	changes  prometheus.Counter
	failures prometheus.Counter
	kills    prometheus.Counter
	step     prometheus.Histogram

	lastStep  int64
	lastRound time.Time
}

func newMeters(job string) *meters {
	labels := prometheus.Labels{"training_job": job}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
	}
	return &meters{
		rounds:   counter("torchft_quorum_rounds_total", "Quorums answered, one for each step."),
		changes:  counter("torchft_quorum_changes_total", "Quorums with other members than the one before."),
		failures: counter("torchft_member_failures_total", "Members that were found dead."),
		kills:    counter("torchft_kills_total", "Members that were ended on request."),
		step: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "torchft_step_seconds",
			Help:        "Time from one step of the job to the next.",
			ConstLabels: labels,
			Buckets:     prometheus.ExponentialBuckets(0.005, 2, 16), // 5 ms to 2.7 minutes
		}),
	}
}

// round is called for each quorum that is answered.
func (m *meters) round(step int64, now time.Time) {
	m.rounds.Inc()
	if steps := step - m.lastStep; steps > 0 && !m.lastRound.IsZero() {
		m.step.Observe(now.Sub(m.lastRound).Seconds() / float64(steps))
	}
	if step != m.lastStep || m.lastRound.IsZero() {
		m.lastStep, m.lastRound = step, now
	}
}

func (m *meters) event(e Event) {
	switch e.Kind {
	case QuorumChanged:
		m.changes.Inc()
	case MemberFailed:
		m.failures.Add(float64(len(e.Left)))
	case Killed:
		m.kills.Add(float64(len(e.Left)))
	}
}

// The label is not called job: Prometheus gives that name to what it scrapes.
var (
	membersDesc = prometheus.NewDesc("torchft_members", "Members by state.", []string{"training_job", "state"}, nil)
	quorumDesc  = prometheus.NewDesc("torchft_quorum_id", "Id of the latest quorum.", []string{"training_job"}, nil)
	inDesc      = prometheus.NewDesc("torchft_quorum_members", "Members of the latest quorum.", []string{"training_job"}, nil)
	stepDesc    = prometheus.NewDesc("torchft_step", "Largest step of the latest quorum.", []string{"training_job"}, nil)
	viewersDesc = prometheus.NewDesc("torchft_dashboard_viewers", "Browsers that look at the page.", []string{"training_job"}, nil)
	heardDesc   = prometheus.NewDesc("torchft_oldest_sign_of_life_seconds", "Age of the oldest sign of life of a member that counts as alive.", []string{"training_job"}, nil)
)

// collect tells what is known of the job when somebody looks.
func (f *Feed) collect(out chan<- prometheus.Metric) {
	status := f.status()
	states := map[State]int{Training: 0, Waiting: 0, Joining: 0, Dead: 0}
	oldest := int64(0)
	for _, m := range status.Members {
		states[stateOf(m)]++
		if m.Healthy {
			oldest = max(oldest, m.HeartbeatAgeMS)
		}
	}
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{f.job}, labels...)...)
	}
	for state, n := range states {
		gauge(membersDesc, float64(n), string(state))
	}
	gauge(quorumDesc, float64(status.QuorumID))
	gauge(inDesc, float64(len(status.Quorum)))
	gauge(stepDesc, float64(status.MaxStep))
	gauge(heardDesc, float64(oldest)/1000)
	f.mu.Lock()
	viewers := len(f.viewers)
	f.mu.Unlock()
	gauge(viewersDesc, float64(viewers))
	for _, c := range []prometheus.Metric{f.meters.rounds, f.meters.changes, f.meters.failures, f.meters.kills, f.meters.step} {
		out <- c
	}
}
