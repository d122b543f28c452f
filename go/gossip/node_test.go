package gossip

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/testmain"
)

var discard = slog.New(slog.DiscardHandler)

// trainer is a member that asks for another view whenever its own is not live any more, as FTLib does.
type trainer struct {
	*Node
	mu   sync.Mutex
	view *agree.View // the members of its communicator
	all  []int64     // numbers of its views
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}
}

func train(node *Node) *trainer {
	tr := &trainer{Node: node, done: make(chan struct{})}
	tr.ctx, tr.stop = context.WithCancel(context.Background())
	go func() {
		defer close(tr.done)
		for tr.ctx.Err() == nil {
			ctx, cancel := context.WithTimeout(tr.ctx, time.Minute) // the timeout of FTLib
			view, err := node.View(ctx)
			cancel()
			if err != nil {
				continue
			}
			tr.set(view)
			for {
				news, err := node.News(tr.ctx)
				if err != nil || news.View == view.Number {
					break
				}
			}
			tr.set(nil)
		}
	}()
	return tr
}

func (tr *trainer) set(v *agree.View) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if tr.view = v; v != nil {
		tr.all = append(tr.all, v.Number)
	}
}

func (tr *trainer) now() *agree.View {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.view
}

func (tr *trainer) end() {
	tr.stop()
	<-tr.done
	_ = tr.Close()
}

// kill ends a member without an announcement.
func (tr *trainer) kill() {
	tr.stop()
	<-tr.done
	tr.close(false)
}

// live returns the views that all of their members are in, determined without the machine's rules.
func live(all []*trainer) (views []*agree.View) {
	in, seen := map[agree.ID]string{}, map[string]bool{}
	for _, tr := range all {
		if v := tr.now(); v != nil {
			in[tr.id] = v.Digest()
		}
	}
	for _, tr := range all {
		v := tr.now()
		if v == nil || seen[v.Digest()] {
			continue
		}
		seen[v.Digest()] = true
		together := true
		for _, q := range v.Members {
			together = together && in[q.ID] == v.Digest()
		}
		if together {
			views = append(views, v)
		}
	}
	return views
}

// until waits for a view of so many members, and checks meanwhile that no two views are live.
func until(t *testing.T, all []*trainer, size int) {
	t.Helper()
	for range 20 * 120 {
		views := live(all)
		require.LessOrEqual(t, len(views), 1)
		if len(views) == 1 && len(views[0].Members) == size {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, tr := range all {
		t.Log(tr.id.Name, tr.machine.Waits())
	}
	t.Fatalf("%d members did not agree on a view", size)
}

func watch(t *testing.T, all []*trainer, span time.Duration, most int) {
	t.Helper()
	for end := time.Now().Add(span); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		require.LessOrEqual(t, len(live(all)), most)
	}
}

func start(m *mesh, numbers ...int) (all []*trainer) {
	for _, number := range numbers {
		all = append(all, train(m.open(number)))
	}
	return all
}

func endAll(all []*trainer) {
	var group sync.WaitGroup
	for _, tr := range all {
		group.Go(tr.end)
	}
	group.Wait()
	ended()
}

// ended waits for the goroutines of memberlist, which end by themselves, at the latest after a probe. It must
// run inside the synctest bubble: its clock stops when the test returns.
func ended() { time.Sleep(5 * time.Second) }

// docs/ftlib.md states this bound; the time is virtual. With FULL there are 100 members with short names,
// except with the race detector, where that would take minutes. Otherwise there are 20 members with the
// longest allowed names, in a job with the longest allowed name: each note fills a packet, and with 100 of
// them gossip would take minutes.
func TestManyMembersAgreeAlthoughPacketsAreLost(t *testing.T) {
	const bound = 20 * time.Second // twice the time of most runs: memberlist uses its own random numbers
	count, long := 20, true
	if testmain.Full() && !testmain.Race() {
		count, long = 100, false
	}
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0.2)
		var all []*trainer
		began := time.Now()
		for i := range count {
			cfg, settings, seeds := m.config(i + 1)
			if long {
				cfg.Job, cfg.Name = strings.Repeat("j", memberlist.LabelMaxSize), longest(t, cfg)
				settings.Label, settings.Name = cfg.Job, cfg.settings().Name
			}
			node, err := m.try(cfg, settings, seeds)
			require.NoError(t, err)
			all = append(all, train(node))
		}
		until(t, all, count)
		for _, node := range all[0].list.Members() {
			if testmain.Race() {
				break // memberlist changes these records without a lock that a reader could take
			}
			require.LessOrEqual(t, len(node.Meta), memberlist.MetaMaxSize)
			require.Equal(t, long, len(node.Meta) > memberlist.MetaMaxSize*8/10)
		}
		t.Logf("%d members agree after %v", count, time.Since(began))
		require.LessOrEqual(t, time.Since(began), bound)
		began = time.Now()
		all[count/2].kill()
		until(t, append(all[:count/2:count/2], all[count/2+1:]...), count-1)
		t.Logf("a failure is noticed, and another view agreed on, after %v", time.Since(began))
		require.LessOrEqual(t, time.Since(began), bound)
		endAll(append(all[:count/2:count/2], all[count/2+1:]...))
	})
}

// longest returns the longest name that is allowed with the other settings of a configuration.
func longest(t *testing.T, cfg Config) string {
	t.Helper()
	require.NoError(t, cfg.Validate())
	for cfg.Validate() == nil {
		cfg.Name += "-"
	}
	return cfg.Name[:len(cfg.Name)-1]
}

// With 100 members of the longest names, the metadata of each and the state that two of them exchange are
// within the limits.
func TestTheLongestNamesFit(t *testing.T) {
	n := &Node{log: discard}
	const most = math.MaxInt64 / 2 // the largest number that members accept
	view := agree.View{Number: most}
	for i := range 100 {
		cfg := Config{Name: fmt.Sprintf("m%03d", i), StoreAddress: "host:65535", MinMembers: 1}
		cfg.Name, cfg.Incarnation = longest(t, cfg), math.MaxInt64
		view.Members = append(view.Members, agree.Member{ID: cfg.id(), Address: cfg.StoreAddress})
		n.id = cfg.id()
		n.machine = agree.New(agree.Config{Me: n.id, Address: cfg.StoreAddress})
		last := agree.Note{
			Address: cfg.StoreAddress, Asks: true, Wants: most, Joined: most,
			Digest: view.Digest(), Formed: true, Left: true,
		}
		require.Len(t, metadata(n.id, last), memberlist.MetaMaxSize,
			"one more byte in the name would be too many")
	}
	known := agree.Known{Formed: &view}
	for _, q := range view.Members {
		known.Left = append(known.Left, agree.Final{ID: q.ID, Joined: most})
	}
	n.machine.Learn(known)
	require.Equal(t, known, n.machine.Known())
	require.Less(t, len(delegate{n}.LocalState(true)), 200_000, "memberlist takes 20 MiB")
}

// docs/ftlib.md states this bound. Virtual time.
func TestAMemberThatStopsIsNoticedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		all := start(m, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
		until(t, all, 10)
		for len(all) > 6 {
			killed := all[0]
			all = all[1:]
			began := time.Now()
			killed.kill()
			until(t, all, len(all))
			t.Log(time.Since(began))
			require.LessOrEqual(t, time.Since(began), 6*time.Second)
		}
		endAll(all)
	})
}

func TestPartitions(t *testing.T) {
	for name, away := range map[string]int{"60 and 40": 4, "50 and 50": 5} {
		t.Run(name, func(t *testing.T) {
			continues := max(away, 10-away) // a half is that of the oldest member, which is the seed
			synctest.Test(t, func(t *testing.T) {
				m := newMesh(t, 0.05)
				all := start(m, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
				until(t, all, 10)
				var cut []*Node
				for _, tr := range all[:away] { // including the seed
					cut = append(cut, tr.Node)
				}
				for _, long := range []time.Duration{3 * time.Second, 40 * time.Second} {
					m.cut(cut...)
					watch(t, all, long, 1)
					if long > 10*time.Second {
						until(t, all, continues)
						require.Equal(t, away == 5, live(all)[0].Has(all[0].id))
					}
					m.cut()
					until(t, all, 10)
				}
				endAll(all)
			})
		})
	}
}

func TestAMemberThatLeavesOrIsStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		all := start(m, 1, 2)
		until(t, all, 2)
		all[1].end()
		began := time.Now()
		until(t, all[:1], 1)
		require.Less(t, time.Since(began), time.Second, "the member announced that it leaves")
		all[1] = train(m.open(2))
		until(t, all, 2)
		all[1].kill()
		watch(t, all[:1], 20*time.Second, 1)
		until(t, all[:1], 1) // half with the oldest member
		all[1] = train(m.open(2))
		until(t, all, 2)
		all[0].kill()
		watch(t, all[1:], 20*time.Second, 1)
		require.Empty(t, live(all[1:]), "half without it is not enough")
		require.Contains(t, all[1].machine.Waits(), "1 of the 2 members of view")
		all[1].end()
		all = start(m, 1, 2)
		until(t, all, 2)
		endAll(all)
	})
}

// A process that is restarted on a host whose clock is behind replaces its earlier incarnation all the same.
func TestAnIncarnationWithAnEarlierClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		later := func(number int) *trainer {
			cfg, settings, seeds := m.config(number)
			cfg.Incarnation += int64(time.Hour)
			node, err := m.try(cfg, settings, seeds)
			require.NoError(t, err)
			return train(node)
		}
		all := []*trainer{train(m.open(1)), later(2), train(m.open(3))}
		until(t, all, 3)
		for name, known := range map[string]func(){
			"the others have not noticed its end":  func() {},
			"the others have continued without it": func() { until(t, []*trainer{all[0], all[2]}, 2) },
		} {
			earlier := all[1].ID()
			all[1].kill()
			known()
			all[1] = train(m.open(2))
			until(t, all, 3)
			require.NotEqual(t, earlier, all[1].ID(), name)
		}
		endAll(all)
	})
}

func TestMembersThatStoppedAnsweringAreTriedAgain(t *testing.T) {
	n := &Node{log: discard, name: "me.1", changed: make(chan struct{}), wake: make(chan struct{}, 1)}
	n.peers, n.failed = map[string]peer{}, map[string]bool{}
	n.machine = agree.New(agree.Config{Me: agree.ID{Name: "me", Incarnation: 1}})
	node := func(name string, life int64, host byte) *memberlist.Node {
		id := agree.ID{Name: name, Incarnation: life}
		return &memberlist.Node{Name: name + strconv.FormatInt(life, 10), Addr: net.IP{10, 0, 0, host},
			Port: 1, Meta: metadata(id, agree.Note{})}
	}
	for _, failed := range []*memberlist.Node{node("a", 1, 1), node("b", 1, 2), node("c", 1, 3)} {
		events{n}.NotifyJoin(failed)
		events{n}.NotifyLeave(failed)
	}
	require.Len(t, n.failed, 3)
	events{n}.NotifyJoin(node("a", 2, 1))
	events{n}.NotifyJoin(node("d", 1, 2))
	require.Equal(t, map[string]bool{"10.0.0.3:1": true}, n.failed,
		"others have the addresses of a and b: both have ended")
	for i := range 2 * mostFailed {
		gone := node("e", int64(i), 5)
		gone.Port = uint16(1000 + i)
		events{n}.NotifyLeave(gone)
	}
	require.Len(t, n.failed, mostFailed)
}

func TestTokensAreReplacedWhileMembersTrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0.05)
		var files []string
		write := func(tokens ...string) {
			for _, path := range files { // one after the other
				require.NoError(t, os.WriteFile(path+".draft", []byte(strings.Join(tokens, "\n")), 0o600))
				// a new file: its modification time is not that of the test's fake clock
				require.NoError(t, os.Rename(path+".draft", path))
				time.Sleep(2 * time.Second)
			}
		}
		add := func(number int, tokens ...string) *trainer {
			path := filepath.Join(t.TempDir(), "tokens")
			require.NoError(t, os.WriteFile(path, []byte(strings.Join(tokens, "\n")), 0o600))
			cfg, settings, seeds := m.config(number)
			node, err := m.try(withTokens(cfg, path), settings, seeds)
			require.NoError(t, err)
			files = append(files, path)
			return train(node)
		}
		all := []*trainer{add(1, "old-secret"), add(2, "old-secret"), add(3, "old-secret")}
		until(t, all, 3)
		view := all[0].now().Number
		for _, tokens := range [][]string{{"old-secret", "new-secret"}, {"new-secret", "old-secret"},
			{"new-secret"}} {
			write(tokens...)
			watch(t, all, 5*time.Second, 1)
		}
		require.Equal(t, view, all[0].now().Number, "no member failed meanwhile")
		require.Len(t, all[0].keys.GetKeys(), 1)
		all = append(all, add(4, "new-secret"))
		until(t, all, 4)

		cfg, settings, seeds := m.config(5)
		_, err := m.try(withTokens(cfg, filepath.Join(t.TempDir(), "none")), settings, seeds)
		require.ErrorContains(t, err, "token_file")
		path := filepath.Join(t.TempDir(), "old")
		require.NoError(t, os.WriteFile(path, []byte("old-secret"), 0o600))
		cfg, settings, seeds = m.config(5)
		_, err = m.try(withTokens(cfg, path), settings, seeds)
		require.ErrorContains(t, err,
			"none of the seeds 10.0.0.1:7946 answered within 20s: a node answers, and refuses this one")
		require.ErrorContains(t, err, "TORCHFT_TOKEN_FILE")
		endAll(all)
	})
}

func TestBadSeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		first := train(m.open(1))
		for name, test := range map[string]struct {
			change    func(cfg *Config, seeds *[][]string)
			wantError string
		}{
			"no seed answers": {func(_ *Config, seeds *[][]string) { *seeds = [][]string{{at(9)}, {at(8)}} },
				"timed out"},
			"another job": {func(cfg *Config, _ *[][]string) { cfg.Job = "another" },
				"the job (TORCHFT_JOB_ID)"},
		} {
			cfg, _, seeds := m.config(2)
			test.change(&cfg, &seeds)
			settings := cfg.settings()
			settings.AdvertiseAddr, settings.AdvertisePort = "10.0.0.2", 7946
			began := time.Now()
			_, err := m.try(cfg, settings, seeds)
			require.ErrorContains(t, err, "none of the seeds", name)
			require.ErrorContains(t, err, test.wantError, name)
			require.LessOrEqual(t, time.Since(began), cfg.ConnectTimeout+5*time.Second, name)
		}
		first.end()
		ended()
	})
}

func TestALateSeedIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		second := make(chan *trainer)
		go func() { second <- train(m.open(2)) }()
		time.Sleep(5 * time.Second)
		first := train(m.open(1))
		all := []*trainer{first, <-second}
		until(t, all, 2)
		endAll(all)
	})
}

// All members have a list of three seeds. Two of these are restarted at the same time, and reach each other
// first: they must not found a second job.
func TestSeedsThatAreStartedAgainJoinTheJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		seeds := [][]string{{at(1)}, {at(2)}, {at(3)}}
		opened := func(numbers ...int) (all []*trainer) {
			found := make(chan *trainer)
			for _, number := range numbers {
				go func() {
					cfg, settings, _ := m.config(number)
					node, err := m.try(cfg, settings, seeds)
					if !assert.NoError(t, err) {
						found <- nil
						return
					}
					found <- train(node)
				}()
			}
			for range numbers {
				all = append(all, <-found)
			}
			return all
		}
		all := opened(1, 2, 3)
		all = append(all, opened(4, 5)...)
		until(t, all, 5)
		rest := all[3:]
		for _, tr := range all[:3] {
			if tr.id.Name == "m003" {
				rest = append(rest, tr)
			} else {
				tr.kill()
			}
		}
		until(t, rest, 3)
		watch(t, rest, 15*time.Second, 1) // the remaining members no longer send to the two
		m.mu.Lock()
		m.slow[at(3)] = time.Second // so that the two reach each other first
		m.mu.Unlock()
		all = append(opened(1, 2), rest...)
		until(t, all, 5)
		endAll(all)
	})
}

func TestAListOfMembersThatDoesNotCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 0)
		cfg, settings, seeds := m.config(1)
		cfg.MinMembers = 2
		node, err := m.try(cfg, settings, seeds)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = node.View(ctx)
		require.EqualError(t, err, "list of members: timed out after 1s: 1 of 2 members")
		go func() {
			time.Sleep(time.Second)
			_ = node.Close()
		}()
		_, err = node.View(t.Context())
		require.ErrorIs(t, err, ErrClosed)
		_, err = node.News(t.Context())
		require.ErrorIs(t, err, ErrClosed)
		last := node.machine.Note()
		_, err = node.View(t.Context())
		require.ErrorIs(t, err, ErrClosed)
		require.Equal(t, last, node.machine.Note(), "the note of a closed node must not change: it was sent")
		ended()
	})
}

func TestSettingsThatAreNotAllowed(t *testing.T) {
	good := Config{Name: "a", StoreAddress: "host:1", MinMembers: 1, Seeds: []string{"host:1", "[::1]:2"}}
	require.NoError(t, good.Validate())
	for wantError, change := range map[string]func(c *Config){
		"port=-1 is not allowed":                func(c *Config) { c.Port = -1 },
		"min_members=0 is not allowed":          func(c *Config) { c.MinMembers = 0 },
		"job id (TORCHFT_JOB_ID) has 256 bytes": func(c *Config) { c.Job = strings.Repeat("j", 256) },
		`seeds: "host" is not allowed`:          func(c *Config) { c.Seeds = []string{"host"} },
		`seeds: ":1" is not allowed`:            func(c *Config) { c.Seeds = []string{":1"} },
		"bytes; allowed: 512":                   func(c *Config) { c.Name = strings.Repeat("n", 500) },
		`the store's address "hhhh`: func(c *Config) {
			c.StoreAddress = strings.Repeat("h",
				500)
		},
	} {
		bad := good
		change(&bad)
		require.ErrorContains(t, bad.Validate(), wantError)
	}
}

// Real sockets: a node of another job cannot join, and closing a node ends its sockets and goroutines.
func TestSockets(t *testing.T) {
	cfg := Config{Name: "a", Incarnation: 1, StoreAddress: "host:1", Host: "localhost", MinMembers: 1,
		Job: "one", ConnectTimeout: time.Minute}
	cfg.Log = discard
	first, err := Open(t.Context(), cfg)
	require.NoError(t, err)
	view, err := first.View(t.Context())
	require.NoError(t, err)
	require.Len(t, view.Members, 1)

	taken := cfg
	_, port, err := net.SplitHostPort(first.Address())
	require.NoError(t, err)
	taken.Name, taken.Seeds = "b", []string{first.Address()}
	taken.Port, err = strconv.Atoi(port)
	require.NoError(t, err)
	_, err = Open(t.Context(), taken)
	require.ErrorContains(t, err, "cannot be used")
	other := taken
	other.Port, other.Job, other.ConnectTimeout = 0, "another", time.Second
	_, err = Open(t.Context(), other)
	require.ErrorContains(t, err, "of the two differs")
	unreachable := other
	unreachable.Seeds = []string{"host.invalid:1"}
	_, err = Open(t.Context(), unreachable)
	require.ErrorContains(t, err, `seed "host.invalid:1" has no address`)

	second := taken
	second.Port = 0
	node, err := Open(t.Context(), second)
	require.NoError(t, err)
	all := []*trainer{train(first), train(node)}
	until(t, all, 2)
	for _, tr := range all {
		tr.end()
	}
	_, err = Open(t.Context(), Config{Name: "c", Host: "localhost", ConnectTimeout: time.Second, Log: discard,
		Security: auth.Security{TokenFile: "/none"}})
	require.ErrorContains(t, err, "token_file")
}

// Messages arrive on goroutines of memberlist: a panic there would end the training process.
func TestAPanicOnAReceivedMessageIsLogged(t *testing.T) {
	var log bytes.Buffer
	n := &Node{log: slog.New(slog.NewTextHandler(&log, nil))} // without a machine
	message := []byte("{}")
	require.NotPanics(t, func() { delegate{n}.MergeRemoteState(message, false) })
	require.NotPanics(t, func() { delegate{n}.NodeMeta(512) })
	require.NotPanics(t, func() { delegate{n}.LocalState(true) })
	require.NotPanics(t, func() {
		events{n}.NotifyLeave(&memberlist.Node{Name: "a.1",
			Meta: metadata(agree.ID{Name: "a"}, agree.Note{})})
	})
	require.Equal(t, 1, strings.Count(log.String(), `in="gossip event"`))
	require.Equal(t, 1, strings.Count(log.String(), `in="gossip metadata"`))
	require.Equal(t, 2, strings.Count(log.String(), `in="gossip state"`))
}
