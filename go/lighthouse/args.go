package lighthouse

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/replica"
)

// Help is returned by ParseArgs for --help. It is no failure: the caller prints Usage and exits with 0.
type Help struct{ Usage string }

func (h *Help) Error() string { return h.Usage }

// ParseArgs reads the command line of torchft_lighthouse, without the program's name. The result is valid.
func ParseArgs(args []string) (Config, error) {
	def := DefaultConfig()
	flags := pflag.NewFlagSet("torchft_lighthouse", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {}
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_"))
	})
	bind := flags.String("bind", def.Bind, "host:port to listen on, for gRPC and the status page alike")
	minReplicas := flags.Int("min_replicas", 0, "least number of replica groups in a quorum (required)")
	join := flags.Int64("join_timeout_ms", def.JoinTimeout.Milliseconds(), "how long to wait for replica groups that are alive and have not asked yet")
	tick := flags.Int64("quorum_tick_ms", def.QuorumTick.Milliseconds(), "how often to check for a quorum when no request arrives")
	heartbeat := flags.Int64("heartbeat_timeout_ms", def.HeartbeatTimeout.Milliseconds(), "age of a heartbeat from which a replica group counts as failed")
	grace := flags.Int64("suspect_grace_ms", def.SuspectGrace.Milliseconds(), "how long a replica group whose connection broke may take to come back before it counts as failed")
	stalled := flags.Int64("stalled_after_ms", def.StalledAfter.Milliseconds(), "how long a replica group may make no progress while others wait for it, before it is reported as stalled (0: ten median steps, at least 5 s, and 1 ms a group)")
	eject := flags.Int64("eject_stalled_after_ms", def.EjectStalledAfter.Milliseconds(), "how long a replica group may make no progress while others wait for it, before it is evicted from the quorum (0: never)")
	security := auth.SecurityFromEnv()
	for _, file := range []struct {
		to               *string
		name, env, usage string
	}{
		{&security.TokenFile, "token_file", auth.TokenFileEnv, "file with the job's token: requests without it are refused"},
		{&security.TLSCert, "tls_cert", auth.TLSCertEnv, "certificate of this server in PEM; with it the server uses TLS"},
		{&security.TLSKey, "tls_key", auth.TLSKeyEnv, "key of tls_cert in PEM"},
		{&security.TLSClientCA, "tls_client_ca", auth.TLSClientCAEnv, "certificates in PEM of the authorities that sign the clients' certificates: clients without such a certificate are refused"},
		{&security.TLSCA, "tls_ca", auth.TLSCAEnv, "certificates in PEM of the authorities that sign the managers' certificates, to connect to managers for a kill; default: the system's"},
	} {
		flags.StringVar(file.to, file.name, *file.to, file.usage+" (environment: "+file.env+")")
	}
	allowRemoteKill := flags.Bool("allow_remote_kill", def.AllowRemoteKill, "without a token_file, allow requests from other hosts, too, to end replica groups")
	maxConnections := flags.Int("max_connections", def.MaxConnections, "how many connections may be open at once")
	maxJoins := flags.Int("max_joins_per_second", def.MaxJoinsPerSecond, "how often one address may ask to join in a second")
	forbid := flags.Bool("forbid_regression", false, "refuse a quorum whose groups are all below the step that the job has reached, instead of logging a warning")
	maxJobs := flags.Int("max_jobs", def.MaxJobs, "how many jobs (TORCHFT_JOB_ID) there may be at once")
	maxCalls := flags.Int("max_calls_per_job", def.MaxCallsPerJob, "how many streams of members and calls one job may have open at once; a group has one")
	stateDir := flags.String("state_dir", "", "directory for the last quorum of each job, from which a restarted lighthouse continues; \"\": none (default: ~/.local/state/torchft/lighthouse-HOST-PORT, none with port 0)")
	cluster := flags.String("cluster", "", "addresses of all lighthouses of a cluster, with commas between them, the same list for each: an odd number, 3 to 7; they serve the jobs as long as more than half of them reach each other")
	advertise := flags.String("advertise", "", "this lighthouse's address in --cluster (default: the one with a name of this host and the port of --bind)")
	recovers := flags.Bool("recover", false, "begin the cluster anew with this lighthouse alone, and the log in its state_dir, after most of the others were lost for good; what only they had is lost")

	usage := func() string {
		return "Serves the quorum of a torchft job.\n\nUsage: torchft_lighthouse --min_replicas N [flags]\n\n" + flags.FlagUsages() +
			"\nManagers find it through TORCHFT_LIGHTHOUSE=http://host:port, or the addresses of a cluster with commas between them. Status: GET / and /status.\n"
	}
	if err := flags.Parse(args); errors.Is(err, pflag.ErrHelp) {
		return Config{}, &Help{Usage: usage()}
	} else if unknown := (*pflag.NotExistError)(nil); errors.As(err, &unknown) {
		return Config{}, fmt.Errorf("%w%s; see --help", err, nearest(flags, unknown.GetSpecifiedName()))
	} else if err != nil {
		return Config{}, fmt.Errorf("%w; see --help", err)
	}
	if flags.NArg() > 0 {
		return Config{}, fmt.Errorf("%q is not understood: only flags are allowed, see --help", flags.Arg(0))
	}
	if !flags.Changed("min_replicas") {
		return Config{}, errors.New("min_replicas is missing: give --min_replicas N with N of at least 1, see --help")
	}
	cfg := def
	cfg.Bind, cfg.MinReplicas = *bind, *minReplicas
	cfg.Security, cfg.AllowRemoteKill = security, *allowRemoteKill
	cfg.MaxConnections, cfg.MaxJoinsPerSecond = *maxConnections, *maxJoins
	cfg.ForbidRegression, cfg.MaxJobs, cfg.MaxCallsPerJob, cfg.StateDir = *forbid, *maxJobs, *maxCalls, *stateDir
	cfg.Advertise, cfg.Recover = *advertise, *recovers
	if flags.Changed("cluster") {
		list, err := replica.ParseCluster(*cluster)
		if err != nil {
			return Config{}, err
		}
		cfg.Cluster = list
	}
	if !flags.Changed("state_dir") {
		cfg.StateDir = defaultStateDir(*bind)
		cfg.StateOptional = cfg.StateDir != "" && len(cfg.Cluster) == 0
	}
	for _, setting := range []struct {
		name string
		ms   int64
		to   *time.Duration
	}{{"join_timeout_ms", *join, &cfg.JoinTimeout}, {"quorum_tick_ms", *tick, &cfg.QuorumTick}, {"heartbeat_timeout_ms", *heartbeat, &cfg.HeartbeatTimeout}, {"suspect_grace_ms", *grace, &cfg.SuspectGrace}, {"stalled_after_ms", *stalled, &cfg.StalledAfter}, {"eject_stalled_after_ms", *eject, &cfg.EjectStalledAfter}} {
		d, err := Milliseconds(setting.name, setting.ms)
		if err != nil {
			return Config{}, err
		}
		*setting.to = d
	}
	if err := cfg.Validate(); err != nil {
		return cfg, err
	}
	return cfg, cfg.findSelf()
}

// maxMilliseconds is the largest number of milliseconds that a time.Duration holds.
const maxMilliseconds = int64((1<<63 - 1) / time.Millisecond)

// Milliseconds converts a setting in milliseconds to a duration, and returns an error if it would overflow.
func Milliseconds(name string, ms int64) (time.Duration, error) {
	if ms > maxMilliseconds || ms < -maxMilliseconds {
		return 0, fmt.Errorf("%s is %d: it must be at most %d", name, ms, maxMilliseconds)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// nearest returns " (did you mean --x?)" for an unknown flag's name; empty if no flag has a similar name.
func nearest(flags *pflag.FlagSet, name string) string {
	found, least := "", len(name)/2+1 // a name with more than half of its letters wrong is not similar
	flags.VisitAll(func(f *pflag.Flag) {
		if d := distance(strings.ReplaceAll(name, "-", "_"), f.Name); d < least {
			found, least = " (did you mean --"+f.Name+"?)", d
		}
	})
	return found
}

// distance returns the Levenshtein distance: the least number of letters to insert, delete or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range a {
		before := row[0] // the value in the row above, one place to the left
		row[0] = i + 1
		for j := range b {
			replaced := before
			if a[i] != b[j] {
				replaced++
			}
			before = row[j+1]
			row[j+1] = min(row[j]+1, before+1, replaced)
		}
	}
	return row[len(b)]
}

// gcPercent is the GOGC of a process that only serves a lighthouse. With 10,000 groups 580 MB are live. With Go's default of 100
// the process takes 760 MB, with 60 it takes 690 MB. The time of a round is the same.
const gcPercent = 60

// OwnProcess sets the garbage collector of a process that only serves a lighthouse, unless GOGC does.
func OwnProcess() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}
