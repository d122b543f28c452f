package lighthouse

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/clock"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rendezvous"
	"github.com/torchft/torchft/go/torchftpb"
)

// job is one job of a lighthouse: its machine, and its pending requests. Jobs share only the server's
// connections and settings.
type job struct {
	server *Server
	cfg    Config
	log    *slog.Logger
	name   string
	site   *http.ServeMux // the routes of board

	// The server's lock guards these.
	users  int       // calls and streams that use the job
	since  time.Time // when it was last used, or last had a live member
	served bool      // it has had a quorum, formed by this lighthouse or remembered

	mu      sync.Mutex
	machine *quorum.Machine
	waiters rpc.Waiters[quorum.WaiterID, answer]
	streams streams
	latest  *delivery // the latest quorum that was delivered here; nil before the first
	news    news
	why     why
	board   *dashboard.Feed // for the page and the API
	notices perMinute       // that processes of the job have told
	stop    chan struct{}   // closed by close
	stepped time.Time       // time of the machine's last event
	asleep  time.Duration   // for how long the host had been suspended at the last tick
	wake    *time.Timer     // runs when the grace of a suspect is over
	saver   *saver          // of the state, nil if none is kept
	heals   map[string]heal // by replica_id, as reported
	stacked perMinute       // stacks of ranks that were recorded
	heard   time.Time       // when keepers were heard last
	told    map[string]bool // in the log and the history already: refused members, reports of all groups
	blamed  int64           // id of the last quorum with a failure whose cost was reported
	ended   error           // why the job has been closed, nil while it is open
	term    int64           // of the cluster's leader, 0 without a cluster

	rendezvous      *rendezvous.Machine // of torchrun's agents
	nodes           rpc.Waiters[rendezvous.WaiterID, placed]
	rendezvousTimer *time.Timer // runs when the rendezvous may change without an event
	kept            state       // the state that the disk should hold

	greeting *stream // the stream whose greeting is being handled

	shared shared // has a lock of its own
}

// answer is the result of a quorum request.
type answer struct {
	delivered *delivery
	err       error
}

func newJob(s *Server, name string) *job {
	j := &job{server: s, cfg: s.cfg, log: s.log, name: name, since: time.Now(), stepped: time.Now(),
		asleep: clock.Suspended(), stop: make(chan struct{}), told: map[string]bool{}}
	if name != rpc.DefaultJob {
		j.log = s.log.With("job", name)
	}
	j.wake = rpc.AfterFunc(j.log, "wake", func() { _ = j.feed(quorum.Woken{}) })
	j.kept.Job = name
	j.rendezvous = rendezvous.NewMachine(s.cfg.rendezvousTiming(), rendezvous.State{}, time.Now())
	j.rendezvousTimer = rpc.AfterFunc(j.log, "rendezvous", j.rendezvousDue)
	j.news.timer = rpc.AfterFunc(j.log, "news", j.sendLater)
	j.term = int64(s.term())
	j.machine = quorum.NewMachine(s.cfg.Policy, time.Now(), j.term)
	j.board = dashboard.NewFeed(name, s.cluster != nil, j.shown)
	j.site = http.NewServeMux()
	j.board.Register(j.site)
	if s.store != nil {
		j.begin(s.store)
	}
	rpc.Go(&s.tasks, j.log, "dashboard", func() { j.board.Run(j.stop) }) // last: it reads the saver, too
	return j
}

// close answers all pending requests.
func (j *job) close(reason error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended != nil {
		return
	}
	j.ended = reason
	close(j.stop)
	j.wake.Stop()
	j.rendezvousTimer.Stop()
	j.news.timer.Stop()
	j.waiters.AnswerAll(answer{err: reason})
	j.nodes.AnswerAll(placed{err: reason})
	j.streams.close()
}

// refusals are the status codes of the reasons why a request is refused.
var refusals = map[quorum.Refusal]codes.Code{
	quorum.Overtaken: codes.Aborted,
	quorum.Replaced:  codes.AlreadyExists,
	quorum.Behind:    codes.FailedPrecondition,
	quorum.Left:      codes.FailedPrecondition,
	quorum.Misfit:    codes.InvalidArgument,
	quorum.Poisoned:  codes.FailedPrecondition,
	quorum.Ended:     codes.FailedPrecondition,

	quorum.Unbelieved: codes.InvalidArgument,
	quorum.Unneeded:   codes.FailedPrecondition,
}

// quorum waits until the member that asked is in a quorum, or ctx ends.
func (j *job) quorum(ctx context.Context, asked quorum.Asked) (*delivery, error) {
	id, answered, err := j.ask(asked)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered:
		return a.delivered, a.err
	case <-ctx.Done():
	}
	reason, err := j.withdraw(asked.Member.ReplicaID, id)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answered: // the answer arrived at the deadline
		return a.delivered, a.err
	default:
		return nil, status.Errorf(status.FromContextError(ctx.Err()).Code(), "no quorum in time: %s", reason)
	}
}

func (j *job) ask(asked quorum.Asked) (quorum.WaiterID, <-chan answer, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended != nil {
		return 0, nil, j.ended
	}
	id, answered := j.waiters.Add()
	asked.Waiter = id
	return id, answered, j.step(asked)
}

// withdraw ends a request at its deadline, and returns the reason why there is no quorum.
func (j *job) withdraw(replicaID string, id quorum.WaiterID) (reason string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.waiters.Drop(id)
	if j.ended != nil {
		return "", j.ended
	}
	reason = j.reason(time.Now()) // before the request is withdrawn, so that the reason counts it
	return reason, j.step(quorum.Withdrawn{ReplicaID: replicaID, Waiter: id})
}

func (j *job) feed(event quorum.Event) error {
	if err := j.server.confirm(); err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended != nil {
		return j.ended
	}
	return j.step(event)
}

// safely calls the machine. After a panic the machine's state is unknown: all pending requests get an error,
// and a new machine starts, which continues after the latest quorum, as after a restart. The caller holds mu.
func (j *job) safely(use func()) error {
	return rpc.Guarded(j.log, "the lighthouse", use, func(err error) {
		j.machine = quorum.NewMachine(j.cfg.Policy, time.Now(), j.term)
		j.why = why{}
		j.waiters.AnswerAll(answer{err: err})
		j.streams.renew() // the new machine does not know their greetings
		if j.kept.Highest > 0 {
			var again error // without the latest quorum, should that be the cause: its members show it
			defer rpc.Recovered(j.log, "the lighthouse", &again)
			j.do(quorum.Recalled{Kept: j.kept.Kept}, time.Now())
			j.do(quorum.Copied{Copies: j.kept.Copies}, time.Now())
		}
	})
}

// describe returns the machine's description of its state. It changes nothing, so a panic costs only the
// description: the job goes on. The caller holds mu.
func (j *job) describe(now time.Time) (status quorum.Status) {
	var err error
	defer func() {
		if err != nil {
			status.Reason = rpc.Message(err)
		}
	}()
	defer rpc.Recovered(j.log, "the status of a job", &err)
	return j.machine.Describe(now)
}

// knows reports whether the machine has a record of a member.
func (j *job) knows(replicaID string) (known bool, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	err = j.safely(func() { known = j.machine.Knows(replicaID) })
	return known, err
}

// step feeds the machine one event, and carries out its actions. The caller holds mu: no step may block.
func (j *job) step(event quorum.Event) error {
	return j.safely(func() {
		now := time.Now()
		passed, suspended := now.Sub(j.stepped), time.Duration(0)
		if _, tick := event.(quorum.Tick); tick { // not at each message: it costs two system calls
			suspended = clock.Suspended() - j.asleep
			j.asleep += suspended
		}
		if passed+suspended > j.cfg.HeartbeatTimeout/2+j.cfg.QuorumTick {
			// Ticks come at a fixed interval, so this process was stopped, or its host was suspended.
			// Heartbeats of this time may not have been read yet, so silence during this time must not count.
			// While the host was suspended, the machine's time stood still, so it counts no silence for which
			// the machine has to be told.
			j.log.Warn("torchft: the lighthouse was stopped for some time", "for", passed+suspended,
				"suspended", suspended)
			j.do(quorum.Slept{For: passed}, now)
		}
		j.stepped = now
		j.do(event, now)
	})
}

func (j *job) do(event quorum.Event, now time.Time) {
	actions := j.machine.Step(event, now)
	j.announce(actions, now) // failures are sent before the quorum without the failed members
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Deliver:
			j.why = why{}
			j.board.Round(a.Quorum.MaxStep(), len(a.Quorum.Members), a.Waited, now)
			j.latest = newDelivery(a.Quorum, j.latest)
			j.deliver(a.Waiters, j.latest)
		case quorum.Redeliver:
			j.log.Info("torchft: a quorum is redelivered, because its answer was lost",
				"quorum_id", a.Quorum.ID)
			if j.latest == nil || j.latest.quorum != a.Quorum {
				// formed before this lighthouse started, and shown by a member
				j.latest = newDelivery(a.Quorum, j.latest)
			}
			j.deliver([]quorum.WaiterID{a.Waiter}, j.latest)
		case quorum.Refuse:
			if a.Why == quorum.Ended {
				j.log.Info("torchft: a group is told that it came back too late", "reason", a.Reason)
			}
			j.waiters.Answer(a.Waiter, answer{err: wire.Refused(refusals[a.Why], a.Why, a.Reason)})
		case quorum.Welcome:
			j.greeting.welcome(a)
		case quorum.RefuseStream:
			// the member asks the other lighthouses
			j.greeting.refused = status.Error(codes.Unavailable, a.Reason)
		case quorum.Keep: // it comes before the Deliver of its quorum
			if a.Past.ID == 0 {
				j.log.Info("torchft: the training is complete, as all of its groups reported; the next " +
					"quorum begins a new one")
			}
			j.kept.Kept = a.Kept
			j.keepState()
		case quorum.Call:
			j.log.Info("torchft: the next quorum is called", "quorum_id", a.QuorumID,
				"members", dashboard.Names(a.ReplicaIDs), "reason", a.Reason)
			j.onceKept(func() {
				j.streams.notify(&torchftpb.Notice{Kind: torchftpb.Notice_CALLED, QuorumId: a.QuorumID},
					a.ReplicaIDs...)
			})
		case quorum.Round:
			j.onceKept(func() {
				j.streams.notify(&torchftpb.Notice{Kind: torchftpb.Notice_ROUND_KNOWN, QuorumId: a.QuorumID,
					Step: a.Step}, a.ReplicaIDs...)
			})
		case quorum.Over:
			j.streams.notify(&torchftpb.Notice{Kind: torchftpb.Notice_MEMBER_FAILED, QuorumId: a.QuorumID,
				ReplicaId: a.ReplicaID, Reason: a.Reason}, a.ReplicaID)
		case quorum.Advanced:
			j.board.Advanced(a.Step, a.Members, now)
		case quorum.Recall:
			j.streams.send(&torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Recall{Recall: a.QuorumID},
			}, a.ReplicaID)
		case quorum.Report:
			j.report(a, now)
		case quorum.Changed:
			j.log.Info("torchft: new quorum", "quorum_id", a.Quorum.ID, "replicas", len(a.Quorum.Members),
				"joined", dashboard.Names(a.Joined), "left", dashboard.Names(a.Left), "reason", a.Reason)
			j.board.Record(dashboard.Event{Time: now, Kind: dashboard.QuorumChanged, QuorumID: a.Quorum.ID,
				Step:    a.Quorum.MaxStep(),
				Members: len(a.Quorum.Members), Joined: a.Joined, Left: a.Left, Reason: a.Reason})
		case quorum.Check:
			j.check(a)
		case quorum.AskProgress:
			j.askProgress(a.ReplicaIDs, now)
		case quorum.Drain:
			j.streams.notify(drained(a.Reason), a.ReplicaID)
		case quorum.Judged:
			j.streams.notify(&torchftpb.Notice{Kind: torchftpb.Notice_JUDGED, Reason: a.Verdict}, a.ReplicaID)
		case quorum.Release:
			j.streams.send(&torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Released{Released: true},
			}, a.ReplicaID)
		case quorum.Wake:
			j.wake.Reset(time.Until(a.At))
		}
	}
}

// keepState keeps the state of the job in the store.
func (j *job) keepState() {
	s := j.kept
	s.Used = time.Now().UTC()
	if s.Highest > 0 && j.server.cluster == nil {
		s.Highest += stateAhead
	}
	j.saver.keep(s)
}

// deliver sends a quorum to its members. The caller holds mu.
func (j *job) deliver(to []quorum.WaiterID, d *delivery) {
	j.onceKept(func() {
		for _, id := range to {
			j.waiters.Answer(id, answer{delivered: d})
		}
	})
}

// recalled handles the quorum that a member remembers, the answer to a recall.
func (j *job) recalled(from string, packed []byte) error {
	q, err := wire.Unpack(packed)
	if err == nil {
		err = q.Past().Validate()
	}
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "the quorum that the member remembers: %s", err)
	}
	return j.feed(quorum.Recalled{Quorum: q, From: from})
}

// status returns the machine's description of its state, with heals in progress and trouble with the disk.
func (j *job) status() dashboard.Status {
	j.mu.Lock()
	defer j.mu.Unlock()
	status := dashboard.Status{Status: j.describe(time.Now())}
	status.Members = j.withHeals(status.Status.Members)
	status.Status.Members = nil
	if why, unkept := j.saver.trouble(time.Now()); why != "" {
		status.Unkept, status.UnkeptMS = why, unkept.Milliseconds()
	}
	status.Snapshots = j.server.keepers.snapshots(j.name, time.Now())
	status.Notices = j.board.Notices()
	return status
}
