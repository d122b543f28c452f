package fttest

import (
	"time"

	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// The reports of a rank, which are not answered.

// Suspect reports a failed collective of a quorum, and the suspected member; empty if it is not known.
func Suspect(c *rankclient.Client, quorumID int64, replicaID string) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Suspected{
		Suspected: &torchftpb.PeerSuspected{QuorumId: quorumID, ReplicaId: replicaID},
	}})
}

// ReportProgress answers ProgressAsked: whether the rank waits for other groups, and its activity in words.
func ReportProgress(c *rankclient.Client, groupRank int64, waits bool, what string) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Progress{
		Progress: &torchftpb.RankProgress{GroupRank: groupRank, Waits: waits, What: what},
	}})
}

// ReportOwn reports how long a rank has worked in a step.
func ReportOwn(c *rankclient.Client, groupRank int64, took time.Duration) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Own{
		Own: &torchftpb.OwnTimes{GroupRank: groupRank, TookUs: []int64{took.Microseconds()}, Host: "idle"},
	}})
}

// ReportHealing reports the progress of a heal.
func ReportHealing(c *rankclient.Client, p *torchftpb.HealProgress) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Healing{Healing: p}})
}

// ReportRecovered reports the cost of a recovery.
func ReportRecovered(c *rankclient.Client, r *torchftpb.Recovered) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Recovered{Recovered: r}})
}

// ReportCount adds to a counter of the server.
func ReportCount(c *rankclient.Client, counted *torchftpb.Counted) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Counted{Counted: counted}})
}

// RequestDrain requests that the group leaves.
func RequestDrain(c *rankclient.Client) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Drain{Drain: true}})
}
